"""Steps of a program of an exchange between ranks: count their call, store shards straight into the
memory of peers, say so, wait, and add or copy what has come.

An exchange is one launch of up to ``MAX_CTAS`` programs. Program p of a rank takes part with
programs p of its peers alone, so no barrier of a grid is needed:

    slots     [2, slot]                               what peers write to, in calls of even and of
                                                      odd numbers
    arrivals  [2, phase, MAX_CTAS, NUM_RANKS] int64   by source rank: how far it has got in them
    calls     int64                                   counts calls, MAX_CTAS for each

*Epochs.* A call is known by its number, which every program computes from ``calls`` by one atomic
add: program 0 adds what makes the sum of all programs ``MAX_CTAS``, so it does not matter which one
comes first. It lives in device memory, so a captured graph counts on at each replay; it has 64 bits
and does not wrap.

*Why a slot is free.* Call n + 2 uses the slot of call n. A rank that begins it has ended call
n + 1, in which each of its programs waited for every peer; a peer that sent in call n + 1 had begun
it, and so ended call n, on the same stream before. So nobody waits for a consent. This holds as
long as every call waits for every peer, and a kernel begins after the one before it has ended.

*Why nobody waits in a circle.* A program sends first and waits afterwards, and programs start in
the order of their numbers: of all that wait, those with the smallest number have peers that are
running or will run.

*Pieces.* A program's share may be cut in up to ``MAX_CHUNKS``, so that it sends one while it waits
for another; a flag counts ``epoch * MAX_CHUNKS + chunks - 1``.

*Sizes.* A flag also carries the size of the call (``common/peers.py``), and who waits compares it
with its own. A peer may be one call ahead, which may be of another size: so calls take turns with
their flags, as with slots. 40 bits are left for the epoch: a flag that smaller calls leave alone
would count as new after 2**39 of them, which are more than a month without a pause.

What kernels of exchanges take, in tuples (``how-to/wait-for-a-peer.md`` has their rules); x, out
and slots are of one dtype:

================  ==============  ==========================================  ====================
argument          dtype           shape                                       who writes
================  ==============  ==========================================  ====================
slots.data        of x            [2, slots.elements]                         peers' kernels
slots.table       int64           [NUM_RANKS], addresses of ``data``          the host, once
peers.arrivals    int64           [2, PHASES, MAX_CTAS, NUM_RANKS]            their sources' kernels
peers.table       int64           [NUM_RANKS], addresses of ``arrivals``      the host, once
peers.calls       int64           a word                                      this rank's kernels
peers.guard       int64           as of ``language.wait``                     this rank, its host
lengths           ints            shard, room, total: elements                the host
size, rank        int             what ranks have to agree on; not            the host
                                  specialised
plan              constants       NUM_RANKS, LANES, BLOCK, NUM_CHUNKS         the host
================  ==============  ==========================================  ====================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import flag_value, target_at
from triton_dist.language.signals import SIZE_BITS, sized

MAX_CTAS = tl.constexpr(256)
MAX_CHUNKS = tl.constexpr(16)
PHASES = tl.constexpr(2)
_EPOCH_FROM = tl.constexpr(SIZE_BITS.value + 4)  # of a flag, where the number of its call begins
# Elements of which shards in a slot are multiples, so that each starts on 16 bytes and more.
SHARD_ALIGNMENT = tl.constexpr(128)
# Of packets (``exchange/packets.py``): bytes of data in a line, and words.
LINE_BYTES = tl.constexpr(8)
LINE_WORDS = tl.constexpr(2)
# Alignment of a part, in words: each line lies on 16 bytes.
PART_ALIGNMENT = tl.constexpr(16)


class Slots(NamedTuple):
    """Memory in which parts arrive. data: this rank's two slots. table: by rank, where those are.
    elements: of a slot."""

    data: Any
    table: Any
    elements: Any


class Peers(NamedTuple):
    """Flags by which ranks tell one another. arrivals: this rank's. table: by rank, where those
    are. calls: the count of calls. guard: of waits."""

    arrivals: Any
    table: Any
    calls: Any
    timeout_words: Any


class Packets(NamedTuple):
    """Memory in which words arrive (``exchange/packets.py``); calls and guard as of ``Peers``."""

    words: Any
    table: Any
    calls: Any
    timeout_words: Any
    part_words: Any


class Lengths(NamedTuple):
    """Elements of a shard, those that it takes in a slot, and those of the whole: x of an
    all-reduce and a reduce-scatter, out of an all-gather."""

    shard: Any
    room: Any
    total: Any


class Plan(NamedTuple):
    """Layout of programs: constants. LANES: ranks, rounded up to a power of two. BLOCK:
    elements that a program moves at a time. NUM_CHUNKS: in which its share travels."""

    NUM_RANKS: Any
    LANES: Any
    BLOCK: Any
    NUM_CHUNKS: Any


class Call(NamedTuple):
    """A call under way, in a kernel. flags: by which this program tells each rank of its first
    phase, [LANES]. epoch: its number. offset: of its slot, in elements."""

    flags: Any
    epoch: Any
    offset: Any
    size: Any
    rank: Any


@jit
def begin(slots, peers, size, rank, plan: tl.constexpr):
    """Begin a call of ``size``; once in each program. Flags are looked up before there is anything
    to tell: a look-up takes as long as a load."""
    peer = tl.arange(0, plan.LANES)
    table = tl.load(peers.table + peer, mask=peer < plan.NUM_RANKS, other=0)
    flags = table.to(peers.arrivals.dtype) + tl.program_id(0) * plan.NUM_RANKS + rank
    epoch = begin_call(peers.calls)
    offset = slot_offset(epoch, slots.elements)
    return Call(flags=flags, epoch=epoch, offset=offset, size=size, rank=rank)


@jit
def begin_call(calls_ptr):
    """The number of this call, from 1; once in each program."""
    ctas = tl.num_programs(0)
    share = tl.where(tl.program_id(0) == 0, MAX_CTAS - ctas + 1, 1).to(tl.int64)
    return tl.atomic_add(calls_ptr, share, sem="relaxed", scope="gpu") // MAX_CTAS + 1


@jit
def slot_offset(epoch, slot_elements):
    """Begin of the slot of call ``epoch``, in elements."""
    return tl.multiple_of((epoch % 2) * slot_elements.to(tl.int64), SHARD_ALIGNMENT)


@jit
def flag_of_chunk(call, chunk):
    """Value of the flag of a program that has got through ``chunk`` of ``call``; the first is 0."""
    return sized(call.epoch * MAX_CHUNKS + chunk, call.size)


@jit
def flag_offset(phase, value, NUM_RANKS: tl.constexpr):
    """Distance, from the flags of this program of a first phase in calls of even numbers, to those
    of one of its phases that are set to ``value``."""
    turn = (value >> _EPOCH_FROM).to(tl.int32) & 1
    return (turn * PHASES + phase) * MAX_CTAS * NUM_RANKS


@jit
def notify_ranks(call, phase, value, plan: tl.constexpr):
    """Set the flag of this program at every rank, the own one too, whose other programs may want to
    know, after everything that it stored (release).

    All at once, a thread each: one after another, each release would wait for the one before it to
    have crossed the link.
    """
    tl.debug_barrier()  # a release is one thread's; all threads' stores come before it
    there = tl.arange(0, plan.LANES) < plan.NUM_RANKS
    values = tl.full((plan.LANES,), 0, tl.int64) + value
    with dl.mark("push"):
        tl.atomic_xchg(
            call.flags + flag_offset(phase, value, plan.NUM_RANKS), values, mask=there,
            sem="release", scope="sys",
        )  # fmt: skip


@jit
def await_programs(peers, phase, programs, value, plan: tl.constexpr):
    """Wait until of each rank that of ``programs``, [LANES], has got to ``value`` (acquire); gives
    a token.

    All flags are looked at together: one after another, each look takes as long as the first.
    """
    first = peers.arrivals + flag_offset(phase, value, plan.NUM_RANKS)
    flags = first + programs * plan.NUM_RANKS + tl.arange(0, plan.LANES)
    return dl.wait(flags, plan.NUM_RANKS, value, peers.timeout_words, True)


@jit
def await_peers(peers, phase, value, plan: tl.constexpr):
    """Wait until this program of every rank has got to ``value`` (acquire); gives a token."""
    same = tl.full((plan.LANES,), 0, tl.int32) + tl.program_id(0)
    return await_programs(peers, phase, same, value, plan)


@jit
def chunks_of(elements, plan: tl.constexpr):
    """Blocks of a program's share in one piece, the same in all programs and on all ranks."""
    blocks = tl.cdiv(elements, plan.BLOCK)
    return tl.cdiv(tl.cdiv(blocks, tl.num_programs(0)), plan.NUM_CHUNKS)


@jit
def first_of(block, BLOCK: tl.constexpr):
    """Begin of block number ``block`` of this program in a shard, in elements."""
    return (tl.num_programs(0).to(tl.int64) * block + tl.program_id(0)) * BLOCK


@jit
def behind(offset, token):
    """``offset`` [elements] made to depend on the wait that gave ``token``; it stays as aligned
    as it is, although nobody knows what a token is."""
    return tl.multiple_of(offset + token * SHARD_ALIGNMENT, SHARD_ALIGNMENT)


@jit
def send_block(values, index, mask, slots, offset, room, rank, plan: tl.constexpr):
    """Store ``values``, at ``index`` of a shard, into every peer's slot, as this rank's part."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    with dl.mark("push"):
        for step in tl.static_range(1, NUM_RANKS):
            target = target_at(slots.table, (rank + step) % NUM_RANKS, slots.data) + offset
            tl.store(target + rank.to(tl.int64) * room + index, values, mask=mask)


@jit
def send_copies(
    x_ptr, own_ptr, slots, call, first_block, end_block, lengths, plan: tl.constexpr
):  # fmt: skip
    """Store this program's blocks of x [shard] into every peer's slot, as the part of this rank;
    and to ``own``, unless that is ``None``."""
    for block in range(first_block, end_block):
        index = first_of(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        mask = index < lengths.shard
        x = tl.load(x_ptr + index, mask=mask)
        send_block(x, index, mask, slots, call.offset, lengths.room, call.rank, plan)
        if own_ptr is not None:
            tl.store(own_ptr + index, x, mask=mask)


@jit
def push_shards(x_ptr, slots, call, first_block, end_block, lengths, plan: tl.constexpr):
    """Store this program's blocks of each peer's shard of x [total] into that peer's slot, as the
    part of this rank. Shards follow one another in x."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = first_of(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        with dl.mark("push"):
            for step in tl.static_range(1, NUM_RANKS):
                peer = (call.rank + step) % NUM_RANKS
                source = peer.to(tl.int64) * lengths.shard + index
                mask = (index < lengths.shard) & (source < lengths.total)
                x = tl.load(x_ptr + source, mask=mask)
                target = target_at(slots.table, peer, slots.data) + call.offset
                tl.store(target + call.rank.to(tl.int64) * lengths.room + index, x, mask=mask)


@jit
def add_parts(
    x_ptr,
    out_ptr,
    parts_ptr,
    offset,
    own,
    first_block,
    end_block,
    token,
    lengths,
    rank,
    plan: tl.constexpr,
    slots=None,
    passed_on=None,
):
    """Add this program's blocks of a shard over all ranks, in their order and in fp32, and store
    them, rounded once, to out; with ``slots`` also into every peer's, ``passed_on`` elements from
    their begin.

    x, out: where the own shard begins; ``own``: in the whole, whose end limits it. The peers' parts
    are ``offset`` elements from ``parts_ptr``.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = first_of(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        mask = (index < lengths.shard) & (own + index < lengths.total)
        from_ptr = parts_ptr + behind(offset, token)
        sums = tl.full((plan.BLOCK,), 0.0, tl.float32)
        for source in tl.static_range(NUM_RANKS):
            part_ptr = from_ptr + source * lengths.room.to(tl.int64)
            # A pointer that is chosen, not a branch: all loads are under way at once. From L2,
            # where peers' stores are; L1 may know these addresses from before.
            part_ptr = tl.where(rank == source, x_ptr, part_ptr)
            sums += tl.load(part_ptr + index, mask=mask, cache_modifier=".cg").to(tl.float32)
        total = sums.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + index, total, mask=mask)
        if passed_on is not None:
            send_block(total, index, mask, slots, passed_on, lengths.room, rank, plan)


@jit
def copy_shards(
    out_ptr,
    parts_ptr,
    offset,
    first_block,
    end_block,
    token,
    lengths,
    rank,
    plan: tl.constexpr,
):
    """Copy this program's blocks of every peer's shard, ``offset`` elements from ``parts_ptr``, to
    ``out[peer * shard:]``; out: [total]."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = first_of(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        inside = index < lengths.shard
        from_ptr = parts_ptr + behind(offset, token)
        for step in tl.static_range(1, NUM_RANKS):
            peer = ((rank + step) % NUM_RANKS).to(tl.int64)
            target = peer * lengths.shard + index
            mask = inside & (target < lengths.total)
            part_ptr = from_ptr + peer * lengths.room
            shard = tl.load(part_ptr + index, mask=mask, cache_modifier=".cg")
            tl.store(out_ptr + target, shard, mask=mask)


def tag_number(epoch: int, size: int) -> int:
    """The same on the host, as an unsigned number."""
    return flag_value(epoch, size) & 0x7FFFFFFF | 0x80000000


# Kernels. Each begins a call, then goes through its pieces: it sends one piece while it takes what
# has come of the piece before.


@jit(do_not_specialize=["size", "rank"])
def kernel_reduce_scatter(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank adds its shard of x into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = chunks_of(lengths.shard, plan)
    own = rank.to(tl.int64) * lengths.shard
    for chunk in range(plan.NUM_CHUNKS + 1):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            push_shards(x_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, flag_of_chunk(call, chunk), plan)
        if chunk >= 1:
            token = await_peers(peers, 0, flag_of_chunk(call, chunk - 1), plan)
            add_parts(
                x_ptr + own, out_ptr, slots.data, call.offset, own, first - blocks, first, token,
                lengths, rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["size", "rank"])
def kernel_all_gather(x_ptr, out_ptr, slots, peers, lengths, size, rank, plan: tl.constexpr):
    """Every rank sends x to all and copies what it gets into out."""
    call = begin(slots, peers, size, rank, plan)
    blocks = chunks_of(lengths.shard, plan)
    for chunk in range(plan.NUM_CHUNKS + 1):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            own_ptr = out_ptr + rank.to(tl.int64) * lengths.shard
            send_copies(x_ptr, own_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, flag_of_chunk(call, chunk), plan)
        if chunk >= 1:
            token = await_peers(peers, 0, flag_of_chunk(call, chunk - 1), plan)
            copy_shards(
                out_ptr, slots.data, call.offset, first - blocks, first, token, lengths, rank, plan
            )  # fmt: skip
