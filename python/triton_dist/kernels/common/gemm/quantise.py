"""Quantise rows to fp8, with a scale per row, per 128 elements of a row, or per tensor (static)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS
from triton_dist.runtime.launch import Launch

_FP8_MAX = tl.constexpr(448.0)
"""Largest number of ``float8_e4m3fn``."""
_TILE_ELEMENTS = 4096


@jit(do_not_specialize=["rows"])
def kernel_quantise(
    x_ptr,
    out_ptr,
    scale_ptr,
    rows,
    columns,
    stride_x,
    stride_sm,
    stride_sk,
    static_scale_ptr,
    num_static_scales,
    used_rows_ptr,
    SILU_MUL: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    STATIC_SCALES: tl.constexpr,
):
    """Divide every BLOCK_SIZE_K elements of a row by their scale. Grid (row blocks, blocks of K).

    out: [rows, columns]. With SILU_MUL, x has twice the columns, and silu(left half) * right half
    is quantised. If ``static_scale_ptr`` is not ``None``, the largest of its numbers is the scale
    of all elements. STATIC_SCALES: ``num_static_scales``, rounded up to a power of two. If
    ``used_rows_ptr`` is not ``None``, it points to the number of rows to quantise.
    """
    if used_rows_ptr is not None:
        rows = tl.load(used_rows_ptr)
    row = tl.program_id(0) * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
    column = tl.program_id(1) * BLOCK_SIZE_K + tl.arange(0, BLOCK_SIZE_K)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    x_block = x_ptr + row.to(tl.int64)[:, None] * stride_x + column[None, :]
    x = tl.load(x_block, mask=inside, other=0.0).to(tl.float32)
    if SILU_MUL:
        up = tl.load(x_block + columns, mask=inside, other=0.0).to(tl.float32)
        x = x / (1.0 + tl.exp(-x)) * up
    if static_scale_ptr is None:
        # The lower bound avoids a division by 0 for a row of zeros.
        scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / _FP8_MAX
        tl.store(scale_ptr + row * stride_sm + tl.program_id(1) * stride_sk, scale, mask=row < rows)
        x = x / scale[:, None]
    else:
        scale_index = tl.arange(0, STATIC_SCALES)
        is_scale = scale_index < num_static_scales
        scale = tl.max(tl.load(static_scale_ptr + scale_index, mask=is_scale, other=0.0), 0)
        tl.store(scale_ptr, scale)
        x = tl.clamp(x / scale, -_FP8_MAX, _FP8_MAX, tl.PropagateNan.ALL)
    out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)


def quantise_launch(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    silu_mul: bool,
    static_scale: torch.Tensor | None = None,
    used_rows: torch.Tensor | None = None,
) -> Launch:
    """Return the launch that quantises x into ``out`` [rows, K].

    Args:
        x: [rows, K] with unit stride along K; with ``silu_mul`` [rows, 2 * K], and
            silu(left half) * right half is quantised.
        out: result.
        scale: result, [rows], or [rows, K / 128] with strides (1, rows); [1] with a static scale.
        static_scale: scale that is known before the call. If it has several elements, the largest
            is used. Quotients beyond the range of fp8 are clamped to the largest fp8 number.
        used_rows: int32, number of rows to quantise; default: all.
    """
    rows, K = out.shape
    num_static_scales = 0 if static_scale is None else static_scale.numel()
    is_whole_row = scale.ndim == 1 and static_scale is None
    block_k = triton.next_power_of_2(K) if is_whole_row else BLOCK_ELEMENTS
    block_m = max(1, _TILE_ELEMENTS // block_k)
    return Launch(
        kernel_quantise,
        (triton.cdiv(rows, block_m), triton.cdiv(K, block_k)),
        (x, out, scale, rows, K, x.stride(0), 1, rows, static_scale, num_static_scales, used_rows),
        {
            "SILU_MUL": silu_mul,
            "BLOCK_SIZE_M": block_m,
            "BLOCK_SIZE_K": block_k,
            "STATIC_SCALES": triton.next_power_of_2(max(1, num_static_scales)),
            "num_warps": 4 if block_k <= _TILE_ELEMENTS else 16,
        },
    )
