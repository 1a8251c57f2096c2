"""Device functions of an exchange between ranks, and the kernels of reduce-scatter and all-gather.

An exchange is one launch of up to ``MAX_CTAS`` programs. Each program determines the number of the
call, stores shards directly into the memory of peers, sets flags, waits for the peers' flags, and
adds or copies the received shards. Program p of a rank exchanges data only with the programs p of
its peers, so no grid barrier is needed.

    slots     [2, slot]                               written by peers, alternating by call
    arrivals  [2, phase, MAX_CTAS, NUM_RANKS] int64   flags: progress of each source rank
    calls     int64                                   call counter, grows by MAX_CTAS per call

*Epochs.* The number of a call is its epoch. Each program derives it from ``calls`` by one atomic
add. Together the programs add ``MAX_CTAS`` per call: each adds 1, and program 0 adds the rest.
Programs may execute the add in any order. The counter is in device memory, so replays of a CUDA
graph continue the count. The counter has 64 bits and does not wrap around.

*A slot is free when it is written.* Call n + 2 uses the slot of call n. A rank that begins call n +
2 has ended call n + 1, in which each of its programs waited for every peer. A peer that sent in
call n + 1 had ended call n before, on the same stream. No acknowledgement is needed. This requires
that every call waits for every peer and that a kernel starts after the previous kernel has ended.

*No deadlock.* A program sends before it waits, so it only waits until its peers have started. Each
GPU starts programs in the order of their numbers. Let p be the smallest number of a program that
waits on any rank. Programs below p have ended, so program p starts on every rank and sends.

*Chunks.* The blocks of a program may be divided into up to ``MAX_CHUNKS`` chunks, so that it sends
one chunk while it waits for another. The count in a flag is ``epoch * MAX_CHUNKS + chunk``, with
the index of the last finished chunk.

*Call tags.* A flag also carries the call tag (``common/peers.py``), a number computed from the
call's sizes. The waiting program compares this number with its own. A peer may already be in the
next call, with another call tag, so flags alternate with the slots. The call tag leaves 40 bits for
the epoch. Calls with fewer chunks or programs do not write all flags. An unwritten flag would look
new after 2**39 of these calls, which take more than a month.

Kernels take these tuples (rules: ``how-to/wait-for-a-peer.md``); x, out and slots have one dtype:

====================  =========  ======================================  ======================
argument              dtype      shape                                   written by
====================  =========  ======================================  ======================
slots.data            of x       [2, slots.elements]                     kernels of peers
slots.table           int64      [NUM_RANKS], addresses of ``data``      host, once
peers.arrivals        int64      [2, MAX_PHASES, MAX_CTAS, NUM_RANKS]    kernels of the sources
peers.table           int64      [NUM_RANKS], addresses of ``arrivals``  host, once
peers.calls           int64      one word                                kernels of this rank
peers.timeout_words   int64      see ``language.wait``                   this rank and its host
lengths               ints       shard, stride, total: elements          host
call_tag, rank        int        not specialised; one tag on all ranks   host
plan                  constants  NUM_RANKS, LANES, BLOCK, NUM_CHUNKS     host
====================  =========  ======================================  ======================
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import target_at
from triton_dist.language.signals import CALL_TAG_BITS, tagged

MAX_CTAS = tl.constexpr(256)
MAX_CHUNKS = tl.constexpr(16)
MAX_PHASES = tl.constexpr(2)  # times that a program waits for its peers, per chunk
_EPOCH_BIT = tl.constexpr(CALL_TAG_BITS.value + 4)  # lowest bit of the epoch in a flag
# Shards in a slot are padded to multiples of this number of elements, which aligns each shard to at
# least 16 bytes.
SHARD_ALIGNMENT = tl.constexpr(128)
# Line of packets (``exchange/packets.py``): bytes of data, and number of 8-byte words.
LINE_BYTES = tl.constexpr(8)
LINE_WORDS = tl.constexpr(2)
# Alignment in words of the packets of one source rank; each line is aligned to 16 bytes.
PACKET_ALIGNMENT = tl.constexpr(16)


class Slots(NamedTuple):
    """Memory that receives shards: this rank's two slots, a table with the address of the slots on
    each rank, and the number of elements of one slot."""

    data: Any
    table: Any
    elements: Any


class Peers(NamedTuple):
    """Flags between ranks: this rank's flags, a table with the address of the flags on each rank,
    the call counter, and the timeout words."""

    arrivals: Any
    table: Any
    calls: Any
    timeout_words: Any


class Packets(NamedTuple):
    """Memory that receives packets; ``exchange/packets.py`` describes the members."""

    words: Any
    table: Any
    calls: Any
    timeout_words: Any
    shard_words: Any


class Lengths(NamedTuple):
    """Numbers of elements: of a shard, between the begins of two shards in a slot, and in total.

    ``total`` is the number of elements of x; in an all-gather, of out.
    """

    shard: Any
    stride: Any
    total: Any


class Plan(NamedTuple):
    """Constants of a launch.

    LANES is NUM_RANKS rounded up to a power of two. BLOCK is the number of elements that a program
    moves at a time. NUM_CHUNKS is the number of chunks into which its blocks are divided.
    """

    NUM_RANKS: Any
    LANES: Any
    BLOCK: Any
    NUM_CHUNKS: Any


class Call(NamedTuple):
    """State of a call in a kernel.

    ``flags`` [LANES] are the addresses of this program's first-phase flags on each rank. ``epoch``
    is the number of the call. ``offset`` is the begin of its slot in elements.
    """

    flags: Any
    epoch: Any
    offset: Any
    call_tag: Any
    rank: Any


@jit
def begin_exchange(slots, peers, call_tag, rank, plan: tl.constexpr):
    """Begin a call, and return its ``Call``. Each program calls this function once.

    The addresses of the flags are loaded here, before they are needed. If they were loaded after
    the data is sent, the flags would be late by the latency of a load.
    """
    peer = tl.arange(0, plan.LANES)
    table = tl.load(peers.table + peer, mask=peer < plan.NUM_RANKS, other=0)
    flags = table.to(peers.arrivals.dtype) + tl.program_id(0) * plan.NUM_RANKS + rank
    epoch = begin_call(peers.calls)
    offset = slot_offset(epoch, slots.elements)
    return Call(flags=flags, epoch=epoch, offset=offset, call_tag=call_tag, rank=rank)


@jit
def begin_call(calls_ptr):
    """Return the number of this call, from 1. Each program must call this function once."""
    num_programs = tl.num_programs(0)
    increment = tl.where(tl.program_id(0) == 0, MAX_CTAS - num_programs + 1, 1).to(tl.int64)
    return tl.atomic_add(calls_ptr, increment, sem="relaxed", scope="gpu") // MAX_CTAS + 1


@jit
def slot_offset(epoch, slot_elements):
    return tl.multiple_of((epoch % 2) * slot_elements.to(tl.int64), SHARD_ALIGNMENT)


@jit
def chunk_flag(call, chunk):
    """Return the flag value that reports the end of ``chunk`` in ``call``."""
    return tagged(call.epoch * MAX_CHUNKS + chunk, call.call_tag)


@jit
def flag_offset(phase, value, NUM_RANKS: tl.constexpr):
    """Return the offset of the flags of ``phase`` from the flags of phase 0 in slot 0.

    The epoch in ``value`` selects the slot.
    """
    parity = (value >> _EPOCH_BIT).to(tl.int32) & 1
    return (parity * MAX_PHASES + phase) * MAX_CTAS * NUM_RANKS


@jit
def notify_ranks(call, phase, value, plan: tl.constexpr):
    """Set this program's flag on every rank, including this rank, after all its stores (release).

    One thread sets the flag of each rank. If one thread set all flags, each release would wait
    until the previous release has crossed the link.
    """
    valid = tl.arange(0, plan.LANES) < plan.NUM_RANKS
    values = tl.full((plan.LANES,), 0, tl.int64) + value
    with dl.mark("push"):
        dl.notify(call.flags + flag_offset(phase, value, plan.NUM_RANKS), values, mask=valid)


@jit
def await_programs(
    peers, phase, program, value, plan: tl.constexpr, PROGRAMS: tl.constexpr = 1
):  # fmt: skip
    """Wait (acquire) until the flags of programs ``program`` to ``program + PROGRAMS - 1`` of every
    rank have reached ``value``. Return a token.

    All flags are polled together, which takes as long as polling one flag."""
    FLAGS: tl.constexpr = plan.NUM_RANKS * PROGRAMS
    first = peers.arrivals + flag_offset(phase, value, plan.NUM_RANKS)
    flag = tl.arange(0, triton.next_power_of_2(FLAGS))
    flags = first + (program + flag % PROGRAMS) * plan.NUM_RANKS + flag // PROGRAMS
    return dl.wait(flags, FLAGS, value, peers.timeout_words, True)


@jit
def await_peers(peers, phase, value, plan: tl.constexpr):
    """Wait until the flags of this program on every rank have reached ``value`` (acquire).

    Return a token.
    """
    return await_programs(peers, phase, tl.program_id(0), value, plan)


@jit
def blocks_per_chunk(elements, plan: tl.constexpr):
    """Return the number of blocks per chunk, which is equal in all programs and on all ranks."""
    blocks = tl.cdiv(elements, plan.BLOCK)
    return tl.cdiv(tl.cdiv(blocks, tl.num_programs(0)), plan.NUM_CHUNKS)


@jit
def block_begin(block, BLOCK: tl.constexpr):
    """Return the first element, within a shard, of this program's block number ``block``."""
    return (tl.num_programs(0).to(tl.int64) * block + tl.program_id(0)) * BLOCK


@jit
def after_wait(offset, token):
    """Return ``offset``, in elements, with a data dependency on the wait that returned ``token``.

    Adding the token hides the alignment of the offset from the compiler; the hint restores it.
    """
    return tl.multiple_of(offset + token * SHARD_ALIGNMENT, SHARD_ALIGNMENT)


@jit
def send_block(values, index, mask, slots, offset, stride, rank, plan: tl.constexpr):
    """Store ``values`` at ``index`` of this rank's shard in every peer's slot.

    ``offset`` is the begin of the shards in a peer's memory, in elements.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    with dl.mark("push"):
        for step in tl.static_range(1, NUM_RANKS):
            target = target_at(slots.table, (rank + step) % NUM_RANKS, slots.data) + offset
            tl.store(target + rank.to(tl.int64) * stride + index, values, mask=mask)


@jit
def send_to_all(
    x_ptr, out_shard_ptr, slots, call, first_block, end_block, lengths, plan: tl.constexpr
):  # fmt: skip
    """Store this program's blocks of x [shard] as this rank's shard in every peer's slot.

    Also store them at ``out_shard_ptr``, unless it is ``None``.
    """
    for block in range(first_block, end_block):
        index = block_begin(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        mask = index < lengths.shard
        x = tl.load(x_ptr + index, mask=mask)
        send_block(x, index, mask, slots, call.offset, lengths.stride, call.rank, plan)
        if out_shard_ptr is not None:
            tl.store(out_shard_ptr + index, x, mask=mask)


@jit
def send_to_owners(x_ptr, slots, call, first_block, end_block, lengths, plan: tl.constexpr):
    """Store this program's blocks of x [total] in the slots of the ranks that own their shards."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = block_begin(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        with dl.mark("push"):
            for step in tl.static_range(1, NUM_RANKS):
                peer = (call.rank + step) % NUM_RANKS
                source = peer.to(tl.int64) * lengths.shard + index
                mask = (index < lengths.shard) & (source < lengths.total)
                x = tl.load(x_ptr + source, mask=mask)
                target = target_at(slots.table, peer, slots.data) + call.offset
                tl.store(target + call.rank.to(tl.int64) * lengths.stride + index, x, mask=mask)


@jit
def add_shards(
    x_ptr,
    out_ptr,
    shards_ptr,
    offset,
    shard_begin,
    first_block,
    end_block,
    token,
    lengths,
    rank,
    plan: tl.constexpr,
    slots=None,
    sums_offset=None,
):
    """Sum this program's blocks of a shard over all ranks, and store the sum in out.

    The shards of all ranks are added in fp32 in the order of ranks, and the sum is rounded once.

    Args:
        x_ptr, out_ptr: begin of this rank's shard in x and in out.
        shards_ptr, offset: the peers' shards begin ``offset`` elements after ``shards_ptr``.
        shard_begin: index of this rank's first element in the full tensor.
        slots, sums_offset: if passed, also send the sum to every peer, to ``sums_offset`` elements
            from the begin of its slots.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = block_begin(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        mask = (index < lengths.shard) & (shard_begin + index < lengths.total)
        received_ptr = shards_ptr + after_wait(offset, token)
        acc = tl.full((plan.BLOCK,), 0.0, tl.float32)
        for source in tl.static_range(NUM_RANKS):
            shard_ptr = received_ptr + source * lengths.stride.to(tl.int64)
            # Select a pointer instead of branching, so that all loads are in flight together. The
            # load bypasses L1, which may hold stale data.
            shard_ptr = tl.where(rank == source, x_ptr, shard_ptr)
            acc += tl.load(shard_ptr + index, mask=mask, cache_modifier=".cg").to(tl.float32)
        total = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + index, total, mask=mask)
        if sums_offset is not None:
            send_block(total, index, mask, slots, sums_offset, lengths.stride, rank, plan)


@jit
def copy_shards(
    out_ptr, shards_ptr, offset, first_block, end_block, token, lengths, rank, plan: tl.constexpr
):
    """Copy this program's blocks of every peer's shard to ``out[peer * shard:]``; out is [total].

    The received shards begin ``offset`` elements after ``shards_ptr``.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    for block in range(first_block, end_block):
        index = block_begin(block, plan.BLOCK) + tl.arange(0, plan.BLOCK)
        in_shard = index < lengths.shard
        received_ptr = shards_ptr + after_wait(offset, token)
        for step in tl.static_range(1, NUM_RANKS):
            peer = ((rank + step) % NUM_RANKS).to(tl.int64)
            target = peer * lengths.shard + index
            mask = in_shard & (target < lengths.total)
            shard_ptr = received_ptr + peer * lengths.stride
            shard = tl.load(shard_ptr + index, mask=mask, cache_modifier=".cg")
            tl.store(out_ptr + target, shard, mask=mask)


# Kernels of ranks that exchange shards. Each sends one chunk while it processes the previous chunk.


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_reduce_scatter(
    x_ptr, out_ptr, slots, peers, lengths, call_tag, rank, plan: tl.constexpr
):  # fmt: skip
    """Add this rank's shard of x over all ranks into out."""
    call = begin_exchange(slots, peers, call_tag, rank, plan)
    blocks = blocks_per_chunk(lengths.shard, plan)
    shard_begin = rank.to(tl.int64) * lengths.shard
    for chunk in range(plan.NUM_CHUNKS + 1):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            send_to_owners(x_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, chunk_flag(call, chunk), plan)
        if chunk >= 1:
            token = await_peers(peers, 0, chunk_flag(call, chunk - 1), plan)
            add_shards(
                x_ptr + shard_begin, out_ptr, slots.data, call.offset, shard_begin, first - blocks,
                first, token, lengths, rank, plan,
            )  # fmt: skip


@jit(do_not_specialize=["call_tag", "rank"])
def kernel_all_gather(x_ptr, out_ptr, slots, peers, lengths, call_tag, rank, plan: tl.constexpr):
    """Send x to all ranks and copy the received shards into out."""
    call = begin_exchange(slots, peers, call_tag, rank, plan)
    blocks = blocks_per_chunk(lengths.shard, plan)
    for chunk in range(plan.NUM_CHUNKS + 1):
        first = chunk * blocks
        if chunk < plan.NUM_CHUNKS:
            out_shard_ptr = out_ptr + rank.to(tl.int64) * lengths.shard
            send_to_all(x_ptr, out_shard_ptr, slots, call, first, first + blocks, lengths, plan)
            notify_ranks(call, 0, chunk_flag(call, chunk), plan)
        if chunk >= 1:
            token = await_peers(peers, 0, chunk_flag(call, chunk - 1), plan)
            copy_shards(
                out_ptr, slots.data, call.offset, first - blocks, first, token, lengths, rank, plan
            )  # fmt: skip
