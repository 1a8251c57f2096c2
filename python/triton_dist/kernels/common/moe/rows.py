"""torch's grouped GEMM, and copies that sort rows by expert or restore their order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import Recipe
from triton_dist.kernels.common.moe.routing import BlockMap
from triton_dist.kernels.common.moe.scales import OperandScales
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

ROWS_OF_SINGLE_TILE = 1 << 20
"""Number of rows of a tile that is so large that each expert has a single tile."""
_MAX_COPY_COLUMNS = 2048
_LIBRARY_CAPABILITY = "9.0"


def grouped_mm(A: torch.Tensor, B: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return torch's grouped product of rows of A that are sorted by expert.

    ``ends`` int32 [E] contains the end of the rows of each expert. Rows of the result after the
    last end are undefined.
    """
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    product: torch.Tensor = function(A, B, offs=ends)
    return product


def scaled_grouped_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    ends: torch.Tensor,
    scales: OperandScales,
    dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Return ``grouped_mm`` for fp8 rows with scales per tensor or row. On CPU: in fp32."""
    a_scale, b_scale = scales.a.flatten().contiguous(), scales.b[:, 0].contiguous()
    if A.device.type == "cpu":
        C, begin = A.new_zeros(len(A), B.shape[2], dtype=dtype), 0
        for expert, end in enumerate(ends.tolist()):
            unscaled = A[begin:end].float() @ B[expert].float()
            C[begin:end] = (unscaled * a_scale[begin:end, None] * b_scale[expert]).to(dtype)
            begin = end
        return C
    functional: Any = torch.nn.functional
    if not hasattr(functional, "scaled_grouped_mm"):  # torch below 2.11
        multiply: Any = torch._scaled_grouped_mm
        product_of_old_torch: torch.Tensor = multiply(
            A, B, a_scale, b_scale, offs=ends, out_dtype=dtype, use_fast_accum=use_fast_accum
        )
        return product_of_old_torch
    by_row = functional.ScalingType.RowWise
    product: torch.Tensor = functional.scaled_grouped_mm(
        A, B, a_scale, by_row, b_scale, by_row,
        offs=ends, output_dtype=dtype, use_fast_accum=use_fast_accum,
    )  # fmt: skip
    return product


def has_library_kernel() -> bool:
    """Return whether torch has a grouped GEMM kernel for this device.

    Without a kernel, torch loops over the experts and copies counts to the host.
    """
    device = current_device()
    is_fast = device.facts().get("capability") == _LIBRARY_CAPABILITY
    return is_fast and not device.interprets


def is_library_candidate(key: Any) -> bool:
    """Return whether torch's kernel is worth trying: for bf16 or e4m3, if
    ``grouped_library_supports``."""
    return key.dtype in (torch.bfloat16, torch.float8_e4m3fn) and grouped_library_supports(key)


def grouped_library_supports(key: Any) -> bool:
    """Return whether torch can multiply by weights with the sizes, dtype and layout in ``key``.

    For fp8, torch on Hopper supports e4m3 operands with scales per tensor or row, and bf16 output.
    """
    if hasattr(key, "recipe"):  # ``ScaledKey``, also inside of a ``SkewedKey``
        has_kernel = key.recipe != Recipe.BLOCK.value and key.dtype is torch.float8_e4m3fn
        if not has_kernel or key.out_dtype is not torch.bfloat16:
            return False
    sizes = (key.N, key.K)
    return all(size * key.dtype.itemsize % 16 == 0 for size in sizes) and key.layout != "strided"


def check_grouped_library(function: str, algorithm: str, key: Any) -> None:
    """Raise ``InvalidArgument`` unless ``grouped_library_supports(key)``, which ``algorithm``
    requires."""
    if not grouped_library_supports(key):
        expected = "another algorithm: K, N and the strides of the weights must be multiples of 16 "
        expected += "bytes, fp8 operands e4m3 without block scales, and their output bf16"
        raise InvalidArgument(function, "algorithm", algorithm, expected)


@jit(do_not_specialize=["routes_per_row"])
def kernel_copy_rows(
    source_ptr,
    out_ptr,
    index_ptr,
    end_ptr,
    stride,
    columns,
    routes_per_row,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy out[i] = source[index[i] // routes_per_row]. Grid (rows of out, cdiv(columns, BLOCK)).

    Store zeros if index[i] is at least the number at ``end_ptr``. Without ``index_ptr``, index[i]
    is i.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = row
    if index_ptr is not None:
        index = tl.load(index_ptr + row)
    # Select the number of columns instead of branching: padding rows load nothing and store zeros.
    columns_to_read = columns
    if end_ptr is not None:
        columns_to_read = tl.where(index < tl.load(end_ptr), columns, 0)
    source = source_ptr + (index // routes_per_row).to(tl.int64) * stride
    out = out_ptr + row.to(tl.int64) * columns
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        out = tl.multiple_of(out, 16)
    values = tl.load(source + column, mask=column < columns_to_read, other=0.0)
    tl.store(out + column, values, mask=column < columns)


def gather_rows(A: torch.Tensor, out: torch.Tensor, blocks: BlockMap) -> Launch:
    """Return the launch that fills ``out`` [R, K] with rows of A, sorted by expert.

    A has one row per token, [M, K], or one row per route, [R, K].
    """
    return _copy(A, out, blocks.routes, None, len(blocks.routes) // A.shape[0])


def sorted_scales(scales: OperandScales, blocks: BlockMap) -> tuple[OperandScales, Launch]:
    """Return memory for the scales of rows sorted by expert, and the launch that fills it."""
    out = scales.a.new_empty(len(blocks.routes), 1)
    return scales._replace(a=out), gather_rows(scales.a.contiguous(), out, blocks)


def sorted_product(
    A: torch.Tensor, B: torch.Tensor, blocks: BlockMap, scales: OperandScales | None, key: Any
) -> torch.Tensor:
    """Copy the rows of A, sorted by expert, and return torch's grouped product of the copy."""
    rows = A.new_empty(len(blocks.routes), A.shape[1])
    gather_rows(A, rows, blocks).run()
    if scales is not None:
        scales, copy_scales = sorted_scales(scales, blocks)
        copy_scales.run()
    return multiply_sorted(rows, B, blocks, scales, key)


def multiply_sorted(
    rows: torch.Tensor, B: torch.Tensor, blocks: BlockMap, scales: OperandScales | None, key: Any
) -> torch.Tensor:
    """Return torch's grouped product of rows sorted by expert, with the options in ``key``."""
    ends = blocks.ends[: blocks.E]
    if scales is None:
        return grouped_mm(rows, B, ends)
    return scaled_grouped_mm(rows, B, ends, scales, key.out_dtype, key.use_fast_accum)


def restore_row_order(sorted_rows: torch.Tensor, out: torch.Tensor, blocks: BlockMap) -> Launch:
    """Return the launch that copies ``sorted_rows`` to ``out`` [R, N] in the order of routes.

    Rows of padding become zero.
    """
    return _copy(sorted_rows, out, blocks.rows, blocks.ends[blocks.E - 1 :], 1)


def clear_padding_rows(sorted_rows: torch.Tensor, blocks: BlockMap) -> Launch:
    """Return the launch that zeroes the rows of padding in ``sorted_rows`` [R, N]."""
    return _copy(sorted_rows, sorted_rows, None, blocks.ends[blocks.E - 1 :], 1)


def _copy(
    source: torch.Tensor,
    out: torch.Tensor,
    index: torch.Tensor | None,
    end: torch.Tensor | None,
    routes_per_row: int,
) -> Launch:
    rows, columns = out.shape
    item_bytes = out.element_size()
    block = min(_MAX_COPY_COLUMNS, triton.next_power_of_2(columns))
    aligned = all(size * item_bytes % 16 == 0 for size in (columns, source.stride(0)))
    return Launch(
        kernel_copy_rows,
        (rows, triton.cdiv(columns, block)),
        (source, out, index, end, source.stride(0), columns, routes_per_row),
        {"ALIGNED": aligned and source.data_ptr() % 16 == 0, "BLOCK": block, "num_warps": 4},
    )
