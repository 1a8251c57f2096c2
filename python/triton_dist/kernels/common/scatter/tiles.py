"""Life of a tile of the scattered GEMM (``scatter/kernel.py``): it is stored, announced to
the rank that owns its rows, and there awaited and added; of an all-reduce, the sum goes to all.

A *unit* is what has a flag: a tile, or a chunk of a slab.
"""

from __future__ import annotations

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.addresses import target_at
from triton_dist.kernels.common.flags import flag_of


@jit
def announce_tile(
    flags_ptr, epoch_ptr, M, slab, unit, rank, NUM_RANKS: tl.constexpr, SCATTER: tl.constexpr
):
    """Say that a tile of another rank's ``slab``, of a product of ``M`` rows, is stored: to that
    rank, or to the copy engine."""
    flag = tl.load(flags_ptr + slab)
    if SCATTER == "slab":
        dl.notify(flag.to(tl.pointer_type(tl.int32)) + unit, 1, "add")
    else:
        flag_ptr = flag.to(epoch_ptr.dtype) + unit * NUM_RANKS + rank
        dl.notify(flag_ptr, flag_of(epoch_ptr, M))


@jit
def announce_to_all(flags_ptr, epoch_ptr, M, unit, rank, NUM_RANKS: tl.constexpr):
    """Set this rank's flag of ``unit`` on every rank, the own one too, after everything that the
    program stored; ``flags_ptr``: addresses of the flags by rank.

    All at once, a thread each: one after another, each release would wait for the one before it to
    have crossed the link.
    """
    peer = tl.arange(0, triton.next_power_of_2(NUM_RANKS))
    there = peer < NUM_RANKS
    flags = tl.load(flags_ptr + peer, mask=there, other=0).to(epoch_ptr.dtype)
    dl.notify(flags + unit * NUM_RANKS + rank, flag_of(epoch_ptr, M), mask=there)


@jit
def await_partials(arrivals_ptr, epoch_ptr, M, unit, rank, NUM_RANKS: tl.constexpr):
    """Wait for ``unit`` of every peer, of a product of ``M`` rows; gives a token."""
    value = flag_of(epoch_ptr, M)
    token = 0
    for step in range(1, NUM_RANKS):
        source = (rank + step) % NUM_RANKS
        token += dl.wait(arrivals_ptr + unit * NUM_RANKS + source, 1, value, epoch_ptr + 1, True)
    return token


@jit
def add_partials(
    partials_ptr,
    slot_stride,
    bias_ptr,
    c_ptr,
    row,
    column,
    rows,
    N,
    token,
    rank,
    sums_ptr,
    sums_begin,
    NUM_RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Sum a tile over all ranks and store it to C [rows, N], some rows at a time, so that the
    parts fit in registers.

    With ``"all"`` also to each peer, ``sums_begin`` elements from ``sums_ptr[peer]``, an address,
    on.
    """
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    column_mask = column_index < N
    inside = tl.arange(0, REDUCE_ROWS)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for first in range(0, BLOCK_SIZE_M, REDUCE_ROWS):
        first_row = dl.consume_token(row + first, token)
        mask = (first_row + tl.arange(0, REDUCE_ROWS) < rows)[:, None] & column_mask[None, :]
        begin = first_row.to(tl.int64) * N + column
        # Not from L1, where what the last use left may be. All loads come before the first add, so
        # that they are in flight together.
        if SCATTER == "add":
            sums = partials_ptr + begin + inside
            total = tl.load(sums, mask=mask, other=0.0, cache_modifier=".cg")
            # The compiler gives loads and stores of zeros different layouts: without the barrier a
            # thread sets to zero what another one has still to load.
            tl.debug_barrier()
            tl.store(sums, tl.zeros_like(total), mask=mask)
        else:
            parts = tl.tuple([])
            for source in tl.static_range(NUM_RANKS):
                part_ptr = partials_ptr + source * slot_stride.to(tl.int64) + begin + inside
                part = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
                parts = parts + (part,)  # noqa: RUF005  # a star is no Triton
            total = parts[0].to(tl.float32)
            for source in tl.static_range(1, NUM_RANKS):
                total += parts[source].to(tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column_index, mask=column_mask, other=0.0)
            total += bias.to(tl.float32)[None, :]
        value = total.to(c_ptr.dtype.element_ty)
        tl.store(c_ptr + begin + inside, value, mask=mask)
        if SCATTER == "all":
            for step in tl.static_range(1, NUM_RANKS):
                peer_ptr = target_at(sums_ptr, (rank + step) % NUM_RANKS, c_ptr)
                tl.store(peer_ptr + sums_begin + begin + inside, value, mask=mask)


@jit
def store_tile_by_pointers(
    target_ptr,
    accumulator,
    row,
    column,
    rows,
    N,
    SCATTER: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Store a tile, or add it, at its place in [rows, N] from ``target_ptr`` on; of a tile that
    begins before row 0, what lies behind."""
    local_row, local_column = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    inside = (local_row >= -row) & (local_row < rows - row)
    mask = inside[:, None] & (local_column < N - column)[None, :]
    # 64-bit only where it must be: an offset of 64 bits for each element would cost registers.
    tile_ptr = target_ptr + (row.to(tl.int64) * N + column)
    block = tile_ptr + (local_row[:, None] * N + local_column[None, :])
    if SCATTER == "add":
        tl.atomic_add(block, accumulator, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.store(block, accumulator.to(target_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # an own tile is read back by other threads
