"""Weighted sum over a token's choices (its topk experts).

The input has one row per route, a pair of token and choice. The output has one row per token, so
ranks exchange fewer rows. Sums are fp32, in the order of choices, and rounded once. Padding (routes
without an expert) adds nothing, even if its rows or weights contain NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.runtime.launch import Launch

_BLOCK_ELEMENTS, _MAX_BLOCK_N = 2048, 1024


@jit(do_not_specialize=["M", "E", "block_rows"])
def kernel_topk_sum(
    products_ptr,
    weights_ptr,
    ids_ptr,
    rows_ptr,
    out_ptr,
    M,
    E,
    block_rows,
    first,
    width,
    N,
    TOPK: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Sum ``width`` columns, from ``first`` on, of M tokens. Grid (token blocks, column blocks).

    products: [M * TOPK, width]; the row of a route is ``rows[route]``, or its index if ``rows`` is
    ``None``. out: row blocks of ``block_rows`` tokens, with block_rows * N elements each. Inside a
    row block the columns of this launch are contiguous, [block_rows, width], and begin at element
    ``block_rows * first``.
    """
    token = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    column = tl.program_id(1) * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    valid, inside = token < M, column < width
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
    for choice in tl.static_range(TOPK):
        route = token * TOPK + choice
        # Do not read weight and row of padding, because they may contain NaN.
        expert = tl.load(ids_ptr + route, mask=valid, other=-1)
        has_expert = valid & (expert >= 0) & (expert < E)
        weight = tl.load(weights_ptr + route, mask=has_expert, other=0.0).to(tl.float32)
        row = route
        if rows_ptr is not None:
            row = tl.load(rows_ptr + route, mask=has_expert, other=0)
        products = products_ptr + row.to(tl.int64) * width
        # Triton cannot derive the alignment of a row.
        if ALIGNED:
            products = tl.multiple_of(products, 16)
        product = tl.load(
            products[:, None] + column[None, :],
            mask=has_expert[:, None] & inside[None, :],
            other=0.0,
        )
        total += weight[:, None] * product.to(tl.float32)
    # Address of the token's columns in its row block; see the docstring.
    block = (token // block_rows).to(tl.int64)
    in_block = (token % block_rows).to(tl.int64)
    out = out_ptr + block * block_rows * N + block_rows.to(tl.int64) * first + in_block * width
    if ALIGNED:
        out = tl.multiple_of(out, 16)
    tl.store(
        out[:, None] + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=valid[:, None] & inside[None, :],
    )


def topk_sum(
    products: torch.Tensor,
    expert_weight: torch.Tensor,
    topk_ids: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    E: int,
    *,
    block_rows: int,
    first: int,
    N: int,
) -> Launch:
    """Return the launch that sums the products of some columns over choices.

    Args:
        products: [M * topk, width], contiguous: columns ``first`` to ``first + width`` of N.
        expert_weight: [M, topk], contiguous, of any floating dtype.
        topk_ids: [M, topk]; ids that are not in 0 to E - 1 add nothing.
        rows: row of each route in ``products``; ``None`` if rows are in the order of routes.
        out: row blocks in the layout of ``kernel_topk_sum``. If ``width`` is N and ``block_rows``
            is M, this is [M, N].
        E: number of experts.
        block_rows: number of tokens of a row block.
        first, N: first column, and total number of columns.
    """
    (M, topk), width = topk_ids.shape, products.shape[1]
    block_n = min(_MAX_BLOCK_N, triton.next_power_of_2(width))
    block_m = max(1, _BLOCK_ELEMENTS // block_n)
    item = products.element_size()
    aligned = all(size * item % 16 == 0 for size in (width, N, first))
    return Launch(
        kernel_topk_sum,
        (triton.cdiv(M, block_m), triton.cdiv(width, block_n)),
        (products, expert_weight, topk_ids, rows, out, M, E, block_rows, first, width, N),
        {
            "TOPK": topk,
            "ALIGNED": aligned and products.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0,
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_N": block_n,
            "num_warps": 4,
        },
    )
