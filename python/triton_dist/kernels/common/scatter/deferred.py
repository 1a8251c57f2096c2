"""Deferred tiles: a program of the scattered GEMM (``scatter/kernel.py``) that cannot wait safely
for the peers' parts leaves its own tiles to a later kernel on the same stream.

A persistent program waits while later ones may have yet to begin: kernels of other streams can hold
multiprocessors. If such a kernel waits for peers itself, as collectives do, and two ranks have each
not begun what the other waits for, everybody waits in a circle. So a program waits only where all
of its launch have begun: then this rank sends all tiles, whatever happens. Else it leaves its own
tiles and ends, and makes room. What waits for its peers' parts behind such a kernel finds them:
their programs have either all begun, or wait for nobody.

    epoch_ptr + BEGUN    programs of this use of the slot that have begun
    left [program]       whether a program has left its own tiles
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.orders import tile_in_scatter_order
from triton_dist.kernels.common.scatter.tiles import (
    add_partials,
    announce_to_all,
    await_partials,
)

# Word of a slot's line, behind those of ``slots/epochs.py``.
BEGUN = tl.constexpr(12)
# Of a program that has looked whether it may wait.
STAYS, LEAVES = tl.constexpr(1), tl.constexpr(-1)


@jit
def begin_program(epoch_ptr):
    """Say that this program has begun."""
    tl.atomic_add(epoch_ptr + BEGUN, 1, sem="relaxed", scope="gpu")


@jit
def stay_or_leave(epoch_ptr, left_ptr):
    """``STAYS`` if all programs of this launch have begun. Else ``LEAVES``, and this program's own
    tiles, from this one on, are the next kernel's."""
    decision = STAYS
    if _begun(epoch_ptr) < tl.num_programs(0):
        dl.give_turn()
        if _begun(epoch_ptr) < tl.num_programs(0):
            tl.store(left_ptr + tl.program_id(0), 1)
            decision = LEAVES
    return decision


@jit
def _begun(epoch_ptr):
    return tl.atomic_add(epoch_ptr + BEGUN, 0, sem="relaxed", scope="gpu")


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_add_left(
    c_ptr,
    bias_ptr,
    partials_ptr,
    arrivals_ptr,
    epoch_ptr,
    left_ptr,
    sums_ptr,
    sum_flags_ptr,
    M,
    rows,
    N,
    slot_stride,
    chunk_tiles_m,
    rank,
    NUM_RANKS: tl.constexpr,
    SCATTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
):
    """Add the own tiles that programs of the GEMM have left, each by the program of its number.
    Grid: the GEMM's."""
    if tl.program_id(0) == 0:
        tl.store(epoch_ptr + BEGUN, 0)
    has_left = tl.load(left_ptr + tl.program_id(0)) != 0
    tl.debug_barrier()  # else the first warp's store may come before the last one's load
    if has_left:
        tl.store(left_ptr + tl.program_id(0), 0)
        tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
        tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
        own_begin = 0  # of the own rows in C
        if SCATTER == "all":
            own_begin = rank.to(tl.int64) * rows * N
        for index in range(tl.program_id(0), NUM_RANKS * tiles_m * tiles_n, NUM_SMS):
            slab, tile, m, n = tile_in_scatter_order(
                index, rank, NUM_RANKS, tiles_m, tiles_n,
                chunk_tiles_m if SCATTER == "all" else tiles_m, GROUP_SIZE_M,
            )  # fmt: skip
            if slab == rank:
                unit = m // chunk_tiles_m if SCATTER == "slab" else tile
                token = await_partials(arrivals_ptr, epoch_ptr, M, unit, rank, NUM_RANKS)
                add_partials(
                    partials_ptr, slot_stride, bias_ptr, c_ptr + own_begin, m * BLOCK_SIZE_M,
                    n * BLOCK_SIZE_N, min(rows, M - rank * rows), N, token, rank, sums_ptr,
                    own_begin, NUM_RANKS, HAS_BIAS, SCATTER, BLOCK_SIZE_M, BLOCK_SIZE_N,
                    REDUCE_ROWS,
                )  # fmt: skip
                if SCATTER == "all":
                    announce_to_all(sum_flags_ptr, epoch_ptr, M, tile, rank, NUM_RANKS)
