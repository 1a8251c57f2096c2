"""The end of an all-reduce in a GEMM (``scatter/kernel.py``, ``"all"``): each rank takes the
sums of the peers' slabs from where they arrive to C.

A launch of its own. In the GEMM's kernel it would begin no sooner, since every program multiplies
to the end, and one program for each multiprocessor copies at half the speed of many.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.flags import flag_of
from triton_dist.kernels.common.gemm.orders import tile_in_scatter_order


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_copy_sums(
    c_ptr,
    sums_ptr,
    arrivals_ptr,
    epoch_ptr,
    M,
    rows,
    N,
    chunk_tiles_m,
    rank,
    NUM_RANKS: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    COPY_ROWS: tl.constexpr,
):
    """Wait for the sum of a tile, and with ``COPY`` bring it from ``sums_ptr`` [M, N] to C [M, N];
    a tile a program, in the GEMM's order. Grid (tiles of all slabs,): those of the own one are
    there.
    """
    slab, tile, m, n = tile_in_scatter_order(
        tl.program_id(0), rank, NUM_RANKS, tl.cdiv(rows, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N),
        chunk_tiles_m, GROUP_SIZE_M,
    )  # fmt: skip
    if slab != rank:
        flag_ptr = arrivals_ptr + tile * NUM_RANKS + slab
        token = dl.wait(flag_ptr, 1, flag_of(epoch_ptr, M), epoch_ptr + 1, True)
        if COPY:
            end = min((slab + 1) * rows, M)
            column = n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
            local_row = tl.arange(0, COPY_ROWS)
            for first in range(0, BLOCK_SIZE_M, COPY_ROWS):
                row = dl.consume_token(slab * rows + m * BLOCK_SIZE_M + first, token)
                mask = (local_row < end - row)[:, None] & (column < N)[None, :]
                begin = row.to(tl.int64) * N
                inside = local_row[:, None] * N + column[None, :]
                # Not from L1, where what the last use left may be.
                block = tl.load(
                    sums_ptr + begin + inside, mask=mask, other=0.0, cache_modifier=".cg"
                )
                tl.store(c_ptr + begin + inside, block, mask=mask)
