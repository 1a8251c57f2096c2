"""Kernels of the Ulysses exchange; ``op.py`` describes the ops.

Terms:
    * A *local* tensor is [batch, tokens of the rank, all heads].
    * A *global* tensor is [batch, all tokens, heads of the rank].
    * If ``IS_PRE_ATTN`` is true, a call converts local tensors to global tensors, else it converts
      global tensors to local tensors.
    * A *block* is the part that a source rank has before the call and a target
      rank after the call.
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
    begin_exchange,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.peers import target_at


class Heads(NamedTuple):
    """Tensors of a call, or their row strides in elements. ``None`` for absent tensors."""

    q: Any
    k: Any
    v: Any


class TokenCounts(NamedTuple):
    """Numbers of tokens of a call, per batch.

    ``lengths_ptr`` is int32 [2, NUM_RANKS]: the number of tokens of each rank, and the first token
    of each rank in the sequence. It is ``None`` if each rank has ``length`` tokens. ``total`` is
    the number of tokens of all ranks, ``batch`` the batch size.
    """

    lengths_ptr: Any
    length: Any
    total: Any
    batch: Any


class UlyssesPlan(NamedTuple):
    """Constants of a launch.

    WORKERS programs share the elements of a chunk. IS_BATCHED is true if the batch size exceeds 1.
    WIDTHS, COLUMN_BEGINS and RANKS_PER_HEAD have an entry for each of q, k and v: the WIDTH of its
    blocks (0 for an absent tensor), the sum of the earlier WIDTHS, and the number of ranks that use
    the same head. TOTAL_WIDTH is the sum of the WIDTHS. ``exchange/protocol.py`` describes the
    other constants.
    """

    NUM_RANKS: Any
    LANES: Any
    BLOCK: Any
    NUM_CHUNKS: Any
    WORKERS: Any
    IS_PRE_ATTN: Any
    IS_BATCHED: Any
    WIDTHS: Any
    COLUMN_BEGINS: Any
    RANKS_PER_HEAD: Any
    TOTAL_WIDTH: Any


@jit
def tokens_of(counts, rank, plan: tl.constexpr):
    """Return the number of tokens of ``rank``, and its first token in the sequence, per batch."""
    length, first_token = counts.length, rank * counts.length
    if counts.lengths_ptr is not None:
        length = tl.load(counts.lengths_ptr + rank)
        first_token = tl.load(counts.lengths_ptr + plan.NUM_RANKS + rank)
    return length, first_token


@jit
def begin_of_blocks(source, tokens, first_token, batch, plan: tl.constexpr):
    """Return the offset of the blocks of ``source`` in a slot, in elements.

    ``tokens`` is the number of tokens of a block. ``first_token`` is the first token of the source
    in the sequence; it is used only if ``IS_PRE_ATTN``.
    """
    if plan.IS_PRE_ATTN:
        return first_token.to(tl.int64) * batch * plan.TOTAL_WIDTH
    return source.to(tl.int64) * tokens * batch * plan.TOTAL_WIDTH


@jit
def num_rounds(rows, WIDTH: tl.constexpr, plan: tl.constexpr):
    """Return how many times each worker processes BLOCK elements of a chunk."""
    blocks = tl.cdiv(tl.cdiv(rows, plan.NUM_CHUNKS) * WIDTH, plan.BLOCK)
    return tl.cdiv(blocks, plan.WORKERS)


@jit
def elements_of(round, worker, chunk, rows, WIDTH: tl.constexpr, plan: tl.constexpr):
    """Return the first row of the elements that a worker moves in ``round``, their offsets from the
    begin of this row, and their mask."""
    chunk_rows = tl.cdiv(rows, plan.NUM_CHUNKS)
    chunk_begin = chunk * chunk_rows
    chunk_end = tl.minimum(chunk_begin + chunk_rows, rows)
    begin = (worker.to(tl.int64) + round * plan.WORKERS) * plan.BLOCK  # an element of the chunk
    row = begin // WIDTH
    offset = (begin - row * WIDTH).to(tl.int32) + tl.arange(0, plan.BLOCK)
    # The right side is in int64 and has no minimum. The compiler can then derive that vectors are
    # not divided by the mask.
    mask = tl.arange(0, plan.BLOCK) < (chunk_end - chunk_begin) * WIDTH - begin
    return chunk_begin + row, offset, mask


@jit
def offset_in(
    LAYOUT: tl.constexpr, first_row, offset, stride, tokens, first_token, total,
    WIDTH: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Return the offsets of ``elements_of`` in a "block", or in a "local" or "global" tensor whose
    rows have the distance ``stride``."""
    if LAYOUT == "block":
        return first_row * WIDTH + offset
    if LAYOUT == "global":
        if plan.IS_BATCHED:
            row = first_row + offset // WIDTH
            row += row // tokens * (total - tokens) + first_token
            return row * stride + offset % WIDTH
        first_row += first_token
    return first_row * stride + offset // WIDTH * stride + offset % WIDTH


@jit
def copy_block(
    source_ptr, stride, target_ptr, worker, chunk, tokens, first_token, counts,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, WIDTH: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Copy this program's elements of a chunk of a block.

    SOURCE and TARGET are layouts of ``offset_in``. ``tokens`` is the number of tokens of the rank
    with the local tensor, ``first_token`` its first token in the sequence. Only the source may have
    a ``stride``.
    """
    # Loads of received blocks bypass L1, which may hold stale data.
    CACHE: tl.constexpr = ".cg" if SOURCE == "block" else ""
    rows, total = counts.batch.to(tl.int64) * tokens, counts.total
    for round in range(num_rounds(rows, WIDTH, plan)):
        first_row, offset, mask = elements_of(round, worker, chunk, rows, WIDTH, plan)
        source = offset_in(
            SOURCE, first_row, offset, stride, tokens, first_token, total, WIDTH, plan
        )  # fmt: skip
        target = offset_in(
            TARGET, first_row, offset, WIDTH, tokens, first_token, total, WIDTH, plan
        )
        x = tl.load(source_ptr + source, mask=mask, cache_modifier=CACHE)
        tl.store(target_ptr + target, x, mask=mask)


@jit
def send(x, row_strides, slots, call, worker, chunk, counts, plan: tl.constexpr):
    """Store one chunk of each of this rank's blocks in the slots of the other ranks."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    LAYOUT: tl.constexpr = "local" if plan.IS_PRE_ATTN else "global"
    own_tokens, own_first_token = tokens_of(counts, call.rank, plan)
    for step in tl.static_range(1, NUM_RANKS):
        peer = (call.rank + step) % NUM_RANKS
        tokens, first_token = own_tokens, own_first_token
        if not plan.IS_PRE_ATTN:
            tokens, first_token = tokens_of(counts, peer, plan)
        begin = begin_of_blocks(call.rank, tokens, first_token, counts.batch, plan)
        target = target_at(slots.table, peer, slots.data) + call.offset + begin
        rows = counts.batch.to(tl.int64) * tokens
        for i in tl.static_range(3):
            if x[i] is not None:
                source = x[i]
                if plan.IS_PRE_ATTN:
                    source += peer // plan.RANKS_PER_HEAD[i] * plan.WIDTHS[i]
                copy_block(
                    source, row_strides[i], target + rows * plan.COLUMN_BEGINS[i], worker, chunk,
                    tokens, first_token, counts, LAYOUT, "block", plan.WIDTHS[i], plan,
                )  # fmt: skip


@jit
def receive_local(
    x_ptr, stride, out_ptr, slots_ptr, worker, chunk, counts, rank, IS_OWN: tl.constexpr,
    index: tl.constexpr, plan: tl.constexpr,
):  # fmt: skip
    """Write a chunk of a local tensor. Heads are summed over the ranks that share them.

    ``index`` is 0 for q, 1 for k and 2 for v. The rank's own block is in x. If no ranks share
    heads, the own block is written with ``IS_OWN``, and the other blocks without.
    """
    WIDTH: tl.constexpr = plan.WIDTHS[index]
    RANKS_PER_HEAD: tl.constexpr = plan.RANKS_PER_HEAD[index]
    HEAD_SHARDS: tl.constexpr = plan.NUM_RANKS // RANKS_PER_HEAD
    tokens, first_token = tokens_of(counts, rank, plan)
    rows = counts.batch.to(tl.int64) * tokens
    blocks_ptr = slots_ptr + rows * plan.COLUMN_BEGINS[index]
    for round in range(num_rounds(rows, WIDTH, plan)):
        first_row, offset, mask = elements_of(round, worker, chunk, rows, WIDTH, plan)
        own = x_ptr + offset_in(
            "global", first_row, offset, stride, tokens, first_token, counts.total, WIDTH, plan
        )  # fmt: skip
        out = offset_in(
            "local", first_row, offset, HEAD_SHARDS * WIDTH, tokens, first_token, counts.total,
            WIDTH, plan,
        )  # fmt: skip
        for shard in tl.static_range(HEAD_SHARDS):
            needed = mask
            if RANKS_PER_HEAD == 1:
                needed = mask & ((rank == shard) if IS_OWN else (rank != shard))
            # The loads bypass L1, which may hold stale data.
            for replica in tl.static_range(RANKS_PER_HEAD):
                source = shard * RANKS_PER_HEAD + replica
                block = blocks_ptr + source * (rows * plan.TOTAL_WIDTH) + first_row * WIDTH + offset
                block = tl.where(rank == source, own, block)
                x = tl.load(block, mask=needed, cache_modifier=".cg")
                if RANKS_PER_HEAD == 1:
                    value = x
                elif replica == 0:
                    value = x.to(tl.float32)
                else:
                    value += x.to(tl.float32)
            tl.store(out_ptr + out + shard * WIDTH, value.to(out_ptr.dtype.element_ty), mask=needed)


@jit
def receive(
    x, row_strides, results, slots_ptr, worker, chunk, counts, rank, IS_OWN: tl.constexpr,
    plan: tl.constexpr,
):  # fmt: skip
    """Write one chunk of each block for this rank to ``results``, from the slot at ``slots_ptr``.

    With ``IS_OWN``, write the block that the rank sends to itself, else the other blocks. A block
    that is summed over ranks is written with the other blocks.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    if not plan.IS_PRE_ATTN:
        for i in tl.static_range(3):
            if x[i] is not None and (plan.RANKS_PER_HEAD[i] == 1 or not IS_OWN):
                receive_local(
                    x[i], row_strides[i], results[i], slots_ptr, worker, chunk, counts, rank,
                    IS_OWN, i, plan,
                )  # fmt: skip
    else:
        for step in tl.static_range(0 if IS_OWN else 1, 1 if IS_OWN else NUM_RANKS):
            source = (rank + step) % NUM_RANKS
            tokens, first_token = tokens_of(counts, source, plan)
            rows = counts.batch.to(tl.int64) * tokens
            blocks_ptr = slots_ptr + begin_of_blocks(
                source, tokens, first_token, counts.batch, plan
            )
            for i in tl.static_range(3):
                if x[i] is not None:
                    if IS_OWN:
                        copy_block(
                            x[i] + rank // plan.RANKS_PER_HEAD[i] * plan.WIDTHS[i], row_strides[i],
                            results[i], worker, chunk, tokens, first_token, counts, "local",
                            "global", plan.WIDTHS[i], plan,
                        )  # fmt: skip
                    else:
                        copy_block(
                            blocks_ptr + rows * plan.COLUMN_BEGINS[i], 0, results[i], worker, chunk,
                            tokens, first_token, counts, "block", "global", plan.WIDTHS[i], plan,
                        )  # fmt: skip


@jit(do_not_specialize=["length", "total", "batch", "call_tag", "rank"])
def kernel_exchange_heads(
    x, row_strides, results, lengths_ptr, slots, peers, length, total, batch, call_tag, rank,
    plan: tl.constexpr,
):  # fmt: skip
    """Store blocks in the slots of the other ranks, and write received blocks to ``results``.

    Grid (2 * WORKERS,). Programs 0 to WORKERS - 1 only send, so that the link does not wait for
    copies to the results. Program WORKERS + p receives the elements that the programs p of the
    other ranks send. ``lengths_ptr``, ``length``, ``total`` and ``batch``: see ``TokenCounts``.
    """
    call = begin_exchange(slots, peers, call_tag, rank, plan)
    counts = TokenCounts(lengths_ptr=lengths_ptr, length=length, total=total, batch=batch)
    worker = tl.program_id(0)
    if worker < plan.WORKERS:
        for chunk in range(plan.NUM_CHUNKS):
            send(x, row_strides, slots, call, worker, chunk, counts, plan)
            notify_ranks(call, 0, chunk_flag(call, chunk), plan)
    else:
        worker -= plan.WORKERS
        for chunk in range(plan.NUM_CHUNKS):
            receive(
                x, row_strides, results, slots.data, worker, chunk, counts, rank, True, plan
            )  # fmt: skip
        for chunk in range(plan.NUM_CHUNKS):
            token = await_programs(peers, 0, worker, chunk_flag(call, chunk), plan)
            slots_ptr = slots.data + after_wait(call.offset, token)
            receive(x, row_strides, results, slots_ptr, worker, chunk, counts, rank, False, plan)
