"""Device functions for one tile of a GEMM: order of tiles, product and store.

Operands are read through tensor descriptors (TMA) or pointers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import FAST_ACCUM, apply_epilogue_scales, scaled_dot


class Strides(NamedTuple):
    """Strides in elements of A along M and K, and of B along K and N."""

    am: Any
    ak: Any
    bk: Any
    bn: Any


@jit
def tile_in_group(tile, num_tiles_m, num_tiles_n, GROUP_SIZE_M: tl.constexpr):
    """Return (m, n), the row and column of tile number ``tile`` in the grid of tiles.

    The order goes down ``GROUP_SIZE_M`` rows of tiles, then to the next column. Concurrent tiles
    then share rows of A and columns of B in the L2 cache (grouped ordering of the Triton matmul
    tutorial).
    """
    tiles_per_group = GROUP_SIZE_M * num_tiles_n
    first_m = tile // tiles_per_group * GROUP_SIZE_M
    group_m = min(num_tiles_m - first_m, GROUP_SIZE_M)
    return first_m + tile % tiles_per_group % group_m, tile % tiles_per_group // group_m


@jit
def shard_in_arrival_order(position, rank, num_ranks):
    """Return the shard at ``position`` in order of arrival: this rank's, rank + 1, rank + 2, …"""
    return (rank + position) % num_ranks


@jit
def multiply_steps(
    accumulator,
    a_desc,
    b_desc,
    row,
    column,
    first_step,
    end,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    scales=None,
    a_scale_ptr=0,
    scale_row=0,
    rows=0,
    N=0,
    SCALING: tl.constexpr = 0,
    b_row=0,
):
    """Return ``accumulator`` plus the product over steps ``first_step`` to ``end`` along K.

    ``end`` is excluded. ``b_row`` is the row of B that is multiplied by the first column of A.
    ``scales`` and the arguments after it are passed to ``scaled_dot``. ``scale_row`` is the tile's
    first row in the scales of A. Rows from ``rows`` on have no scales.
    """
    with dl.mark("mma"):
        for step in range(first_step, end):
            k = step * BLOCK_SIZE_K
            with dl.mark("load", pipelined=True):
                a = a_desc.load([row, k])
                if B_COLUMN_MAJOR:
                    b = b_desc.load([column, b_row + k]).T
                else:
                    b = b_desc.load([b_row + k, column])
            accumulator = scaled_dot(
                accumulator, a, b, k, column, scales, a_scale_ptr, scale_row, rows, N,
                INPUT_PRECISION, SCALING,
            )  # fmt: skip
    return accumulator


@jit
def multiply_tile(
    a_desc,
    b_desc,
    row,
    column,
    K,
    split,
    num_splits,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    scales=None,
    a_scale_ptr=0,
    scale_row=0,
    rows=0,
    N=0,
    SCALING: tl.constexpr = 0,
):
    """Return the scaled fp32 product [BLOCK_SIZE_M, BLOCK_SIZE_N] over one part of K.

    K is divided into ``num_splits`` parts; ``split`` is the index of this part. ``scaled_dot``
    describes the scales.
    """
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    # wgmma multiplies 64 rows or more. With fewer rows Triton converts fp8 operands to fp16, unless
    # the product is computed as ``(B.T @ A.T).T``. Tiles of 128 columns were not faster (H200).
    TRANSPOSED: tl.constexpr = (
        SCALING >= FAST_ACCUM and B_COLUMN_MAJOR and BLOCK_SIZE_M < 64 and BLOCK_SIZE_N > 128
    )
    SHAPE: tl.constexpr = (
        (BLOCK_SIZE_N, BLOCK_SIZE_M) if TRANSPOSED else (BLOCK_SIZE_M, BLOCK_SIZE_N)
    )
    product = multiply_steps(
        tl.zeros(SHAPE, dtype=tl.float32), a_desc, b_desc, row, column,
        steps * split // num_splits, steps * (split + 1) // num_splits,
        B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_K, scales, a_scale_ptr, scale_row, rows, N,
        SCALING,
    )  # fmt: skip
    if TRANSPOSED:
        product = product.T
    return apply_epilogue_scales(product, scales, a_scale_ptr, scale_row, rows, column, N, SCALING)


@jit
def multiply_tile_by_pointers(
    a_ptr,
    b_ptr,
    row,
    rows_left,
    column,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    scales=None,
    a_scale_ptr=0,
    scale_row=0,
    SCALING: tl.constexpr = 0,
):
    """Multiply a tile like ``multiply_tile``, for any strides of A and B.

    The tile has up to ``rows_left`` rows of A, from ``row`` on. ``INT64_OFFSETS``: offsets along K
    within a block exceed 32 bits. 64-bit offsets take more registers (128 instead of 124, sm_90).
    """
    if INT64_OFFSETS:
        stride_ak, stride_bk = tl.cast(stride_ak, tl.int64), tl.cast(stride_bk, tl.int64)
    local_row = tl.arange(0, BLOCK_SIZE_M)
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    k_index = tl.arange(0, BLOCK_SIZE_K)
    row_mask = local_row < rows_left
    column_mask = column_index < N
    # Row and column numbers times strides may exceed 32 bits.
    a_rows = (row + local_row).to(tl.int64)
    a_block = a_ptr + a_rows[:, None] * stride_am + k_index[None, :] * stride_ak
    b_block = b_ptr + k_index[:, None] * stride_bk + column_index[None, :].to(tl.int64) * stride_bn
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    with dl.mark("mma"):
        for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
            k_mask = k_index < K - step * BLOCK_SIZE_K
            with dl.mark("load", pipelined=True):
                a = tl.load(a_block, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
                b = tl.load(b_block, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
            accumulator = scaled_dot(
                accumulator, a, b, step * BLOCK_SIZE_K, column, scales, a_scale_ptr, scale_row,
                scale_row + rows_left, N, INPUT_PRECISION, SCALING,
            )  # fmt: skip
            a_block += BLOCK_SIZE_K * stride_ak
            b_block += BLOCK_SIZE_K * stride_bk
    return apply_epilogue_scales(
        accumulator, scales, a_scale_ptr, scale_row, scale_row + rows_left, column, N, SCALING
    )


@jit
def store_tile(
    c_desc,
    accumulator,
    shard,
    row,
    column,
    EPILOGUE_SUBTILE: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Convert a tile of C to the dtype of C and store it. EPILOGUE_SUBTILE stores it in two halves,
    which halves the staging memory."""
    with dl.mark("store"):
        if EPILOGUE_SUBTILE:
            # ``tl.split`` needs a last dimension of size 2.
            halves = tl.permute(
                tl.reshape(accumulator, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2)), (0, 2, 1)
            )
            left, right = tl.split(halves)
            left = tl.reshape(left.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N // 2))
            c_desc.store([shard, row, column], left)
            right = tl.reshape(right.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N // 2))
            c_desc.store([shard, row, column + BLOCK_SIZE_N // 2], right)
        else:
            c_desc.store(
                [shard, row, column],
                tl.reshape(accumulator.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N)),
            )
