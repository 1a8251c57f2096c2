"""Kernels of the Ulysses exchange; ``op.py`` describes the ops.

Terms:
    * A *local* tensor is [batch, tokens of the rank, all heads].
    * A *global* tensor is [batch, all tokens, heads of the rank].
    * If ``TO_HEADS`` is true, a call converts local tensors to global tensors, else global tensors
      to local tensors.
    * A *block* is the part that a source rank has before the call and a target rank after the call.
      It has all batches and tokens of the rank with the local tensor, and the heads of the rank
      with the global tensor. A row of a block has WIDTH elements.

If several ranks share a KV head, the head is sent to each of them. In the other direction, the
blocks of these ranks are added.

Blocks are contiguous in the slots. A chunk is a range of rows of a block. Flags, epochs and slots
follow ``common/exchange/protocol.py``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    after_wait,
    await_programs,
    begin,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.peers import target_at


class Heads(NamedTuple):
    """Tensors of a call, or their row strides in elements. ``None`` for absent tensors."""

    q: Any
    k: Any
    v: Any


class Sequence(NamedTuple):
    """Numbers of tokens of a call.

    ``lengths`` is int32 [2, NUM_RANKS]: the number of tokens of each rank, and of all ranks before
    each rank. It is ``None`` if all ranks have equally many.
    """

    lengths: Any


class UlyssesPlan(NamedTuple):
    """Constants of a launch.

    WORKERS programs share the elements of a chunk. Q, K and V are the WIDTH of the blocks of each
    tensor, 0 for absent tensors. REPLICAS is the number of ranks that share a KV head. IS_BATCHED
    is true if the batch size exceeds 1. ``Plan`` describes the other constants.
    """

    NUM_RANKS: Any
    LANES: Any
    BLOCK: Any
    NUM_CHUNKS: Any
    WORKERS: Any
    TO_HEADS: Any
    Q: Any
    K: Any
    V: Any
    REPLICAS: Any
    IS_BATCHED: Any


@jit
def length_of(sequence, length, rank, plan: tl.constexpr):
    """Return the number of tokens of ``rank``, and of all ranks before ``rank``, per batch."""
    before = rank * length
    if sequence.lengths is not None:
        length = tl.load(sequence.lengths + rank)
        before = tl.load(sequence.lengths + plan.NUM_RANKS + rank)
    return length, before


@jit
def block_start(source, tokens, before, batch, plan: tl.constexpr):
    """Return the number of rows in a slot before the block of ``source``.

    ``tokens`` is the number of tokens of the block, ``before`` of the ranks before the source.
    """
    if plan.TO_HEADS:
        return before.to(tl.int64) * batch
    return source.to(tl.int64) * tokens * batch


@jit
def elements_of(round, worker, chunk, rows, WIDTH: tl.constexpr, plan: tl.constexpr):
    """Return the first row of a worker's elements of a chunk, their offsets from its begin, and
    their mask."""
    chunk_rows = tl.cdiv(rows, plan.NUM_CHUNKS)
    first = chunk * chunk_rows
    end = tl.minimum(first + chunk_rows, rows)
    skipped_elements = (worker.to(tl.int64) + round * plan.WORKERS) * plan.BLOCK
    skipped = skipped_elements // WIDTH
    offset = (skipped_elements - skipped * WIDTH).to(tl.int32) + tl.arange(0, plan.BLOCK)
    # The right side is in int64 and has no minimum. The compiler can then derive that vectors are
    # not divided by the mask.
    mask = tl.arange(0, plan.BLOCK) < (end - first) * WIDTH - skipped_elements
    return first + skipped, offset, mask


@jit
def rounds_of(rows, WIDTH: tl.constexpr, plan: tl.constexpr):
    """Return how many times each worker processes BLOCK elements of a chunk."""
    blocks = tl.cdiv(tl.cdiv(rows, plan.NUM_CHUNKS) * WIDTH, plan.BLOCK)
    return tl.cdiv(blocks, plan.WORKERS)


@jit
def offset_in_global(
    first_row, offset, tokens, before, total, stride, WIDTH: tl.constexpr, plan: tl.constexpr
):
    """Return the offsets of elements of a block in a global tensor with ``total`` tokens."""
    if plan.IS_BATCHED:
        row = first_row + offset // WIDTH
        number = row // tokens
        row += number * (total - tokens) + before
        return row * stride + offset % WIDTH
    return (first_row + before) * stride + offset // WIDTH * stride + offset % WIDTH


@jit
def send_part(
    x_ptr, stride, target, worker, chunk, peer, tokens, before, total, batch, part: tl.constexpr,
    plan: tl.constexpr,
):  # fmt: skip
    """Store this program's elements of a chunk of a block in the slot of ``peer``.

    ``target`` is the begin of this rank's blocks, ``before`` the number of tokens of the ranks
    before the peer. ``part`` is 0 for q, 1 for k and 2 for v.
    """
    WIDTH: tl.constexpr = (plan.Q, plan.K, plan.V)[part]
    REPLICAS: tl.constexpr = (1, plan.REPLICAS, plan.REPLICAS)[part]
    column = peer // REPLICAS * WIDTH
    rows = batch.to(tl.int64) * tokens
    target += rows * (0, plan.Q, plan.Q + plan.K)[part]
    for round in range(rounds_of(rows, WIDTH, plan)):
        first_row, offset, mask = elements_of(round, worker, chunk, rows, WIDTH, plan)
        if plan.TO_HEADS:
            source = first_row * stride + offset // WIDTH * stride + offset % WIDTH + column
        else:
            source = offset_in_global(
                first_row, offset, tokens, before, total, stride, WIDTH, plan
            )  # fmt: skip
        x = tl.load(x_ptr + source, mask=mask)
        tl.store(target + first_row * WIDTH + offset, x, mask=mask)


@jit
def send(
    x, row_strides, sequence, slots, call, worker, chunk, length, total, batch, plan: tl.constexpr
):
    """Store one chunk of each of this rank's blocks in the slots of the other ranks."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    own_tokens, own_before = length_of(sequence, length, call.rank, plan)
    for step in tl.static_range(1, NUM_RANKS):
        peer = (call.rank + step) % NUM_RANKS
        tokens, before = own_tokens, own_before
        if not plan.TO_HEADS:
            tokens, before = length_of(sequence, length, peer, plan)
        start = block_start(call.rank, tokens, before, batch, plan) * (plan.Q + plan.K + plan.V)
        target = target_at(slots.table, peer, slots.data) + call.offset + start
        for part in tl.static_range(3):
            if x[part] is not None:
                send_part(
                    x[part], row_strides[part], target, worker, chunk, peer, tokens, before, total,
                    batch, part, plan,
                )  # fmt: skip


@jit
def receive_local(
    x_ptr, stride, out_ptr, slots_ptr, worker, chunk, tokens, before, total, batch, rank,
    part: tl.constexpr, blocks: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a local tensor. Heads are summed over the ranks that share them.

    The rank's own block is in x.
    """
    WIDTH: tl.constexpr = (plan.Q, plan.K, plan.V)[part]
    REPLICAS: tl.constexpr = (1, plan.REPLICAS, plan.REPLICAS)[part]
    rows = batch.to(tl.int64) * tokens
    blocks_ptr = slots_ptr + rows * (0, plan.Q, plan.Q + plan.K)[part]
    block_elements = rows * (plan.Q + plan.K + plan.V)
    SHARDS: tl.constexpr = plan.NUM_RANKS // REPLICAS
    for round in range(rounds_of(rows, WIDTH, plan)):
        first_row, offset, mask = elements_of(round, worker, chunk, rows, WIDTH, plan)
        own = x_ptr + offset_in_global(
            first_row, offset, tokens, before, total, stride, WIDTH, plan
        )  # fmt: skip
        out = first_row * (SHARDS * WIDTH) + offset // WIDTH * (SHARDS * WIDTH) + offset % WIDTH
        for shard in tl.static_range(SHARDS):
            needed = mask
            if REPLICAS == 1:
                needed = mask & ((rank == shard) if blocks == "own" else (rank != shard))
            # The loads bypass L1, which may hold stale data.
            for replica in tl.static_range(REPLICAS):
                source = shard * REPLICAS + replica
                block = blocks_ptr + source * block_elements + first_row * WIDTH + offset
                block = tl.where(rank == source, own, block)
                x = tl.load(block, mask=needed, cache_modifier=".cg")
                if REPLICAS == 1:
                    value = x
                elif replica == 0:
                    value = x.to(tl.float32)
                else:
                    value += x.to(tl.float32)
            tl.store(out_ptr + out + shard * WIDTH, value.to(out_ptr.dtype.element_ty), mask=needed)


@jit
def receive_global(
    x_ptr, stride, out_ptr, slots_ptr, sender, worker, chunk, tokens, before, total, batch, rank,
    part: tl.constexpr, blocks: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Copy a chunk of the block of ``sender`` to a global tensor. The rank's own block is in x."""
    WIDTH: tl.constexpr = (plan.Q, plan.K, plan.V)[part]
    rows = batch.to(tl.int64) * tokens
    if blocks == "own":
        x_ptr += rank // (1, plan.REPLICAS, plan.REPLICAS)[part] * WIDTH
    else:
        start = block_start(sender, tokens, before, batch, plan) * (plan.Q + plan.K + plan.V)
        block_ptr = slots_ptr + start + rows * (0, plan.Q, plan.Q + plan.K)[part]
    for round in range(rounds_of(rows, WIDTH, plan)):
        first_row, offset, mask = elements_of(round, worker, chunk, rows, WIDTH, plan)
        if blocks == "own":
            source = first_row * stride + offset // WIDTH * stride + offset % WIDTH
            value = tl.load(x_ptr + source, mask=mask)
        else:
            value = tl.load(
                block_ptr + first_row * WIDTH + offset, mask=mask, cache_modifier=".cg"
            )  # fmt: skip
        target = offset_in_global(first_row, offset, tokens, before, total, WIDTH, WIDTH, plan)
        tl.store(out_ptr + target, value, mask=mask)


@jit
def receive(
    x, row_strides, results, sequence, slots_ptr, worker, chunk, length, total, batch, rank,
    blocks: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Write one chunk of each block for this rank to ``results``, from the slot at ``slots_ptr``.

    ``blocks`` is "own" for the block that the rank sends to itself, "others" for the other blocks.
    Blocks that are summed over ranks are all read with "others".
    """
    IS_OWN: tl.constexpr = blocks == "own" or not plan.TO_HEADS
    END: tl.constexpr = 1 if IS_OWN else plan.NUM_RANKS
    for step in tl.static_range(0 if IS_OWN else 1, END):
        sender = rank
        if plan.TO_HEADS:
            sender = (rank + step) % plan.NUM_RANKS
        tokens, before = length_of(sequence, length, sender, plan)
        for part in tl.static_range(3):
            if x[part] is not None:
                if plan.TO_HEADS:
                    receive_global(
                        x[part], row_strides[part], results[part], slots_ptr, sender, worker, chunk,
                        tokens, before, total, batch, rank, part, blocks, plan,
                    )  # fmt: skip
                elif part == 0 or plan.REPLICAS == 1 or blocks == "others":
                    receive_local(
                        x[part], row_strides[part], results[part], slots_ptr, worker, chunk, tokens,
                        before, total, batch, rank, part, blocks, plan,
                    )  # fmt: skip


@jit(do_not_specialize=["length", "total", "batch", "call_tag", "rank"])
def kernel_exchange_heads(
    x, row_strides, results, sequence, slots, peers, length, total, batch, call_tag, rank,
    plan: tl.constexpr,
):  # fmt: skip
    """Store blocks in the slots of the other ranks, and write received blocks to ``results``.

    Grid (2 * WORKERS,). Programs 0 to WORKERS - 1 only send, so that the link does not wait for
    copies to the results. Program WORKERS + p receives the elements that the programs p of the
    other ranks send.

    ``length`` is the number of tokens of a rank, unless ``sequence`` has lengths. ``total`` is the
    number of tokens of all ranks.
    """
    call = begin(slots, peers, call_tag, rank, plan)
    worker = tl.program_id(0)
    if worker < plan.WORKERS:
        for chunk in range(plan.NUM_CHUNKS):
            send(x, row_strides, sequence, slots, call, worker, chunk, length, total, batch, plan)
            notify_ranks(call, 0, chunk_flag(call, chunk), plan)
    else:
        worker -= plan.WORKERS
        for chunk in range(plan.NUM_CHUNKS):
            receive(
                x, row_strides, results, sequence, slots.data, worker, chunk, length, total, batch,
                rank, "own", plan,
            )  # fmt: skip
        for chunk in range(plan.NUM_CHUNKS):
            token = await_programs(peers, 0, worker, chunk_flag(call, chunk), plan)
            slots_ptr = slots.data + after_wait(call.offset, token)
            receive(
                x, row_strides, results, sequence, slots_ptr, worker, chunk, length, total, batch,
                rank, "others", plan,
            )  # fmt: skip
