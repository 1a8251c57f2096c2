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
long as every call waits for something of every peer, be it by way of others
(``exchange/trees.py``), and a kernel begins after the one before it has ended.

*Why nobody waits in a circle.* A program sends first and waits afterwards, and programs start in
the order of their numbers: of all that wait, those with the smallest number have peers that are
running or will run.

*Pieces.* A program's share may be cut in up to ``MAX_PIECES``, so that it sends one while it waits
for another; a flag counts ``epoch * MAX_PIECES + pieces - 1``.

*Sizes.* A flag also carries the size of the call (``common/peers.py``), and who waits compares it
with its own. A peer may be one call ahead, which may be of another size: so calls take turns with
their flags, as with slots. 40 bits are left for the epoch: a flag that smaller calls leave alone
would count as new after 2**39 of them, which are more than a month without a pause.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import flag_value, target_at
from triton_dist.language.signals import SIZE_BITS, sized

MAX_CTAS = tl.constexpr(256)
MAX_PIECES = tl.constexpr(16)
PHASES = tl.constexpr(2)
ONE_PIECE = tl.constexpr(1 << SIZE_BITS.value)  # added to a flag, one piece more
_EPOCH_FROM = tl.constexpr(SIZE_BITS.value + 4)  # of a flag, where the number of its call begins
# Elements of which shards in a slot are multiples, so that each starts on 16 bytes and more.
SHARD_ALIGNMENT = tl.constexpr(128)
# Of packets (``exchange/packets.py``): bytes of data in a line, and words.
LINE_BYTES = tl.constexpr(8)
LINE_WORDS = tl.constexpr(2)
# Alignment of a part, in words: each line lies on 16 bytes.
PART_ALIGNMENT = tl.constexpr(16)


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
def flag_of_piece(epoch, pieces, size):
    """Value of the flag of a program that has got through ``pieces`` of call ``epoch``."""
    return sized(epoch * MAX_PIECES + pieces - 1, size)


@jit
def flag_offset(phase, value, NUM_RANKS: tl.constexpr):
    """Distance, from the flags of this program of a first phase in calls of even numbers, to those
    of one of its phases that are set to ``value``."""
    turn = (value >> _EPOCH_FROM).to(tl.int32) & 1
    return (turn * PHASES + phase) * MAX_CTAS * NUM_RANKS


@jit
def flags_at_ranks(
    arrivals_ptr, arrivals_table, rank, NUM_RANKS: tl.constexpr, LANES: tl.constexpr
):
    """Flags by which this program tells each rank of its first phase, [LANES]: the ranks, rounded
    up to a power of two. Looked up before there is anything to tell: a look-up takes as long as a
    load."""
    peer = tl.arange(0, LANES)
    table = tl.load(arrivals_table + peer, mask=peer < NUM_RANKS, other=0)
    return table.to(arrivals_ptr.dtype) + tl.program_id(0) * NUM_RANKS + rank


@jit
def tell_ranks(flags, phase, value, NUM_RANKS: tl.constexpr, LANES: tl.constexpr):
    """Set the flag of this program at every rank, the own one too, whose other programs may want to
    know, after everything that it stored (release).

    All at once, a thread each: one after another, each release would wait for the one before it to
    have crossed the link.
    """
    tl.debug_barrier()  # a release is one thread's; all threads' stores come before it
    there = tl.arange(0, LANES) < NUM_RANKS
    values = tl.zeros((LANES,), tl.int64) + value
    tl.atomic_xchg(
        flags + flag_offset(phase, value, NUM_RANKS), values, mask=there,
        sem="release", scope="sys",
    )  # fmt: skip


@jit
def await_programs(arrivals_ptr, guard_ptr, phase, programs, value, NUM_RANKS: tl.constexpr):
    """Wait until of each rank that of ``programs``, [ranks, rounded up to a power of two], has got
    to ``value`` (acquire); gives a token.

    All flags are looked at together: one after another, each look takes as long as the first.
    """
    sources = tl.arange(0, programs.shape[0])
    flags = arrivals_ptr + flag_offset(phase, value, NUM_RANKS) + programs * NUM_RANKS + sources
    return dl.wait(flags, NUM_RANKS, value, guard_ptr, True)


@jit
def await_peers(
    arrivals_ptr, guard_ptr, phase, value, NUM_RANKS: tl.constexpr, LANES: tl.constexpr
):
    """Wait until this program of every rank has got to ``value`` (acquire); gives a token."""
    same = tl.zeros((LANES,), tl.int32) + tl.program_id(0)
    return await_programs(arrivals_ptr, guard_ptr, phase, same, value, NUM_RANKS)


@jit
def await_pushed(arrivals_ptr, epoch_ptr, value, piece, rank, NUM_RANKS: tl.constexpr):
    """Wait until a copy engine of every peer has brought ``piece``; gives a token. The flags,
    [piece, source rank], are set to ``value``, that of the slot."""
    token = 0
    for step in range(1, NUM_RANKS):
        source = (rank + step) % NUM_RANKS
        flag = arrivals_ptr + piece * NUM_RANKS + source
        token += dl.wait(flag, 1, value, epoch_ptr + 1, True)
    return token


@jit
def pieces_of(elements, BLOCK: tl.constexpr, NUM_PIECES: tl.constexpr):
    """Blocks of a program's share in one piece, the same in all programs and on all ranks."""
    return tl.cdiv(tl.cdiv(tl.cdiv(elements, BLOCK), tl.num_programs(0)), NUM_PIECES)


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
def send_block(
    values,
    index,
    mask,
    slots_ptr,
    slots_table,
    offset,
    shard_elements,
    rank,
    NUM_RANKS: tl.constexpr,
):
    """Store ``values``, at ``index`` of a shard, into every peer's slot, as this rank's part."""
    for step in tl.static_range(1, NUM_RANKS):
        target = target_at(slots_table, (rank + step) % NUM_RANKS, slots_ptr) + offset
        tl.store(target + rank.to(tl.int64) * shard_elements + index, values, mask=mask)


@jit
def send_copies(
    x_ptr,
    slots_ptr,
    own_ptr,
    slots_table,
    offset,
    elements,
    shard_elements,
    first_block,
    end_block,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Store this program's blocks of x [elements] into every peer's slot, as the part of this rank;
    with ``KEEP`` also to ``own``."""
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = index < elements
        values = tl.load(x_ptr + index, mask=mask)
        send_block(
            values, index, mask, slots_ptr, slots_table, offset, shard_elements, rank, NUM_RANKS
        )
        if KEEP:
            tl.store(own_ptr + index, values, mask=mask)


@jit
def push_shards(
    x_ptr,
    slots_ptr,
    slots_table,
    offset,
    elements,
    total,
    shard_elements,
    first_block,
    end_block,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store this program's blocks of each peer's shard of x [total] into that peer's slot, as the
    part of this rank. Shards of ``elements`` follow one another in x."""
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        for step in tl.static_range(1, NUM_RANKS):
            peer = (rank + step) % NUM_RANKS
            source = peer.to(tl.int64) * elements + index
            mask = (index < elements) & (source < total)
            values = tl.load(x_ptr + source, mask=mask)
            target = target_at(slots_table, peer, slots_ptr) + offset
            tl.store(target + rank.to(tl.int64) * shard_elements + index, values, mask=mask)


@jit
def add_parts(
    x_ptr,
    slots_ptr,
    out_ptr,
    slots_table,
    offset,
    gathered_offset,
    x_first,
    out_first,
    elements,
    total,
    shard_elements,
    first_block,
    end_block,
    token,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PASS_ON: tl.constexpr,
):
    """Add this program's blocks of a shard over all ranks, in their order and in fp32, and store
    them, rounded once, to ``out[out_first:]``; with ``PASS_ON`` also into every peer's slot.

    The own part is ``x[x_first:]``; ``total`` limits both.
    """
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        mask = (index < elements) & (x_first + index < total)
        parts_ptr = slots_ptr + behind(offset, token)
        sums = tl.zeros((BLOCK,), dtype=tl.float32)
        for source in tl.static_range(NUM_RANKS):
            part_ptr = parts_ptr + source * shard_elements.to(tl.int64)
            # A pointer that is chosen, not a branch: all loads are under way at once. From L2,
            # where peers' stores are; L1 may know these addresses from before.
            part_ptr = tl.where(rank == source, x_ptr + x_first, part_ptr)
            sums += tl.load(part_ptr + index, mask=mask, cache_modifier=".cg").to(tl.float32)
        values = sums.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + out_first + index, values, mask=mask)
        if PASS_ON:
            send_block(
                values, index, mask, slots_ptr, slots_table, gathered_offset, shard_elements, rank,
                NUM_RANKS,
            )  # fmt: skip


@jit
def copy_shards(
    slots_ptr,
    out_ptr,
    offset,
    elements,
    total,
    shard_elements,
    first_block,
    end_block,
    token,
    rank,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy this program's blocks of every peer's shard out of the slot, to
    ``out[peer * elements:]``; out: [total]."""
    for block in range(first_block, end_block):
        index = first_of(block, BLOCK) + tl.arange(0, BLOCK)
        inside = index < elements
        from_ptr = slots_ptr + behind(offset, token)
        for step in tl.static_range(1, NUM_RANKS):
            peer = ((rank + step) % NUM_RANKS).to(tl.int64)
            target = peer * elements + index
            mask = inside & (target < total)
            values = tl.load(
                from_ptr + peer * shard_elements + index, mask=mask, cache_modifier=".cg"
            )
            tl.store(out_ptr + target, values, mask=mask)


def tag_number(epoch: int, size: int) -> int:
    """The same on the host, as an unsigned number."""
    return flag_value(epoch, size) & 0x7FFFFFFF | 0x80000000
