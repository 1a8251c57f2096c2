"""Products of a tile: through tensor descriptors, or by pointers."""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit


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
):
    """``accumulator`` plus the product over steps ``first_step`` to ``end`` along K."""
    for step in range(first_step, end):
        k = step * BLOCK_SIZE_K
        a = a_desc.load([row, k])
        if B_COLUMN_MAJOR:
            b = b_desc.load([column, k]).T
        else:
            b = b_desc.load([k, column])
        accumulator = tl.dot(a, b, accumulator, input_precision=INPUT_PRECISION)
    return accumulator


@jit
def multiply_tile(
    a_desc,
    b_desc,
    row,
    column,
    K,
    part,
    num_parts,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """fp32 [BLOCK_SIZE_M, BLOCK_SIZE_N] product of rows from ``row`` and columns from ``column``
    on, over the ``part``-th of ``num_parts`` parts of K."""
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    return multiply_steps(
        tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32), a_desc, b_desc, row, column,
        steps * part // num_parts, steps * (part + 1) // num_parts,
        B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_K,
    )  # fmt: skip


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
):
    """The same for any strides: the first ``rows_left`` rows from ``row`` on are read."""
    local_row = tl.arange(0, BLOCK_SIZE_M)
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    k_index = tl.arange(0, BLOCK_SIZE_K)
    row_mask = local_row < rows_left
    column_mask = column_index < N
    a_rows = (row + local_row).to(tl.int64)
    a_block = a_ptr + a_rows[:, None] * stride_am + k_index[None, :] * stride_ak
    b_block = b_ptr + k_index[:, None] * stride_bk + column_index[None, :].to(tl.int64) * stride_bn
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
        k_mask = k_index < K - step * BLOCK_SIZE_K
        a = tl.load(a_block, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        b = tl.load(b_block, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=INPUT_PRECISION)
        a_block += BLOCK_SIZE_K * stride_ak
        b_block += BLOCK_SIZE_K * stride_bk
    return accumulator


@jit
def operands_at(
    a_ptr,
    b_ptr,
    M,
    N,
    K,
    stride_bk,
    stride_bn,
    DESCRIPTORS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """A [M, K] and B [K, N] as ``multiply_operands`` takes them: descriptors, or the pointers."""
    a, b = a_ptr, b_ptr
    if DESCRIPTORS:
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
        if B_COLUMN_MAJOR:
            b = tl.make_tensor_descriptor(
                b_ptr, [N, K], [stride_bn, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]
            )
        else:
            b = tl.make_tensor_descriptor(
                b_ptr, [K, N], [stride_bk, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N]
            )
    return a, b


@jit
def multiply_operands(
    a,
    b,
    row,
    column,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    DESCRIPTORS: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """The tile at ``row`` and ``column`` of the product, fp32; a and b from ``operands_at``."""
    if DESCRIPTORS:
        product = multiply_tile(
            a, b, row, column, K, 0, 1,
            B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
    else:
        product = multiply_tile_by_pointers(
            a, b, row, M - row, column, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
    return product
