"""fp8 operands for tests and benchmarks: scales by recipe, products, and a bound of the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common.gemm.scales import (
    BLOCK_ELEMENTS,
    FP8,
    Recipe,
    Scaling,
    blocks,
    scaled_matmul,
)
from triton_dist.kernels.common.libraries import all_gather_rows
from triton_dist.kernels.common.moe.rows import grouped_mm, scaled_grouped_mm
from triton_dist.kernels.common.moe.scales import OperandScales

# Unit roundoffs of an output, with a margin for the rounding of the reference.
_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}

Scales = dict[str, Any]
"""``A_scale`` and ``B_scale`` of fp8 operands; empty for other operands."""


def scales_of(operands: Mapping[str, torch.Tensor]) -> Scales:
    """Return the scales among the operands."""
    return {name: operands[name] for name in ("A_scale", "B_scale") if name in operands}


def new_scales(
    a: torch.Tensor, b: torch.Tensor, recipe: Recipe | None, generator: torch.Generator | None
) -> Scales:
    """Return scales for ``a`` [M, K] and ``b`` [K, N] or [E, K, N]; empty without a recipe.

    The scales of ``a`` are uninitialised. Those of ``b`` are uniform from 0.5 to 1.
    """
    (M, K), (*experts, _, N) = a.shape, b.shape
    shapes: dict[Recipe | None, tuple[Sequence[int], Sequence[int]]] = {
        Recipe.TENSOR: ((1,), experts or (1,)),
        Recipe.ROW: ((M,), (*experts, N)),
        Recipe.BLOCK: ((blocks(K), M), (*experts, blocks(N), blocks(K))),
    }
    if recipe is None:
        return {}
    A_scale, B_scale = (torch.empty(tuple(shape), device=b.device) for shape in shapes[recipe])
    B_scale.uniform_(0.5, 1, generator=generator)
    return {"A_scale": A_scale.t() if recipe is Recipe.BLOCK else A_scale, "B_scale": B_scale}


def in_fp32(A: torch.Tensor, B: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [M, K] and [K, N] in fp32, multiplied by their scales, if any."""
    return Scaling(**scales).dequantised(A, B) if scales else (A.float(), B.float())


def rows_of(A: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``A[index]``; not every device indexes fp8."""
    return A.view(torch.uint8)[index].view(A.dtype) if A.dtype in FP8 else A[index]


def of_expert(scales: Scales, rows: torch.Tensor, expert: int) -> Scales:
    """Return the scales for the rows ``rows`` of A and for the weights of one expert."""
    if not scales:
        return scales
    a, b = scales["A_scale"], scales["B_scale"]
    if a.ndim == 2:
        a = a.t()[:, rows].t()
    elif len(a) > 1:
        a = a[rows]
    return {"A_scale": a, "B_scale": b[expert : expert + 1] if b.ndim == 1 else b[expert]}


def gather(
    A: torch.Tensor, scales: Scales, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, Scales]:
    """Return the rows of all ranks, and their scales, by the group's collective."""
    if not scales:
        return all_gather_rows(A, group), scales
    # Neither NCCL nor gloo gathers every fp8 dtype.
    rows = all_gather_rows(A.view(torch.uint8), group).view(A.dtype)
    scale = scales["A_scale"]
    if scale.ndim == 2:
        by_rank = all_gather_rows(scale.t(), group).view(-1, *scale.t().shape)
        scale = by_rank.transpose(0, 1).reshape(scale.shape[1], -1).t()
    else:  # each rank has its own scale, so one per tensor becomes one per row
        scale = all_gather_rows(scale.expand(len(A)).contiguous(), group)
    return rows, {**scales, "A_scale": scale}


def multiply(
    A: torch.Tensor, B: torch.Tensor, scales: Scales, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``A @ B`` by torch, in ``out`` or new memory."""
    if not scales:
        return torch.matmul(A, B, out=out)
    return scaled_matmul(A, B, Scaling(**scales), out)


def library_product(
    A: torch.Tensor,
    B: torch.Tensor,
    ends: torch.Tensor,
    order: torch.Tensor,
    scales: Scales,
) -> Callable[[], torch.Tensor]:
    """Return a call of torch's grouped GEMM of the rows ``order`` of A, sorted by expert."""
    rows = rows_of(A, order)
    if not scales:
        return lambda: grouped_mm(rows, B, ends)
    scales = {**by_row(A, B, scales)}
    if len(scales["A_scale"]) > 1:
        scales["A_scale"] = scales["A_scale"][order]
    of_operands = OperandScales.of(rows, B, Scaling(**scales))
    assert of_operands is not None
    return lambda: scaled_grouped_mm(rows, B, ends, of_operands, torch.bfloat16, False)


def by_row(A: torch.Tensor, B: torch.Tensor, scales: Scales) -> Scales:
    """Return scales that torch's grouped GEMM has on Hopper: for BLOCK, row-wise scales of 1."""
    if not scales or scales["A_scale"].ndim == 1:
        return scales
    ones = scales["B_scale"].new_ones
    return {"A_scale": ones(len(A)), "B_scale": ones(len(B), B.shape[2])}


def _block_maxima(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the largest magnitude of each block of ``rows`` by 128 elements."""
    down, along = -(-x.shape[0] // rows), blocks(x.shape[1])
    padded = x.new_zeros(down * rows, along * BLOCK_ELEMENTS)
    padded[: x.shape[0], : x.shape[1]] = x.abs()
    return padded.view(down, rows, along, BLOCK_ELEMENTS).amax((1, 3))


def _quantise(
    x: torch.Tensor, recipe: Recipe, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [n, K] in fp8 and its scales, by blocks of ``rows`` by 128 for BLOCK."""
    if recipe is Recipe.TENSOR:
        largest = x.abs().amax().reshape(1, 1)
    elif recipe is Recipe.ROW:
        largest = x.abs().amax(1, keepdim=True)
    else:
        largest = _block_maxima(x, rows)
    scale = largest.float().clamp(min=1e-12) / torch.finfo(dtype).max
    full = scale
    if recipe is Recipe.BLOCK:
        full = scale.repeat_interleave(rows, 0)[: x.shape[0]]
        full = full.repeat_interleave(BLOCK_ELEMENTS, 1)[:, : x.shape[1]]
    return (x / full).to(dtype), scale


def quantised(
    A: torch.Tensor, B: torch.Tensor, recipe: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor, Scaling]:
    """Return A [M, K] in ``dtype``, B [N, K] in e4m3 as a K-major [K, N], and their scales.

    Block scales of B have DeepSeek-V3's layout [N / 128, K / 128].
    """
    kind = Recipe(recipe)
    a, A_scale = _quantise(A, kind, 1, dtype)
    b, B_scale = _quantise(B, kind, BLOCK_ELEMENTS, torch.float8_e4m3fn)
    if kind is Recipe.BLOCK:
        A_scale = A_scale.t().contiguous().t()
    else:
        A_scale, B_scale = A_scale.view(-1), B_scale.view(-1)
    return a, b.t(), Scaling(A_scale, B_scale)


def quantised_experts(
    A: torch.Tensor, B: torch.Tensor, recipe: str, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return A [rows, K] in ``dtype``, B [E, N, K] in e4m3 as [E, K, N], and their scales.

    Scales of B have the layouts of checkpoints: [E], [E, N, 1], or [E, N / 128, K / 128].
    """
    kind = Recipe(recipe)
    a, A_scale = _quantise(A, kind, 1, dtype)
    each = [_quantise(expert, kind, BLOCK_ELEMENTS, torch.float8_e4m3fn) for expert in B]
    B_scale = torch.stack([scale for _, scale in each])
    if kind is Recipe.BLOCK:
        A_scale = A_scale.t().contiguous().t()
    else:
        A_scale = A_scale.view(-1)
    B_scale = B_scale.view(-1) if kind is Recipe.TENSOR else B_scale
    return a, torch.stack([b for b, _ in each]).mT, {"A_scale": A_scale, "B_scale": B_scale}


def error_of_sum(K: int, on_gpu: bool, use_fast_accum: bool = False) -> float:
    """Return the largest error of a sum of K scaled products, relative to the sum of magnitudes.

    K additions, two scales and one bias in fp32 err by K + 3 roundoffs. Hopper's tensor cores keep
    at least 13 bits while they add fp8 products: all K, or 128 before a partial sum is promoted.
    """
    in_tensor_cores = (K if use_fast_accum else min(K, BLOCK_ELEMENTS)) + 3
    return (K + 3) * 2.0**-24 + on_gpu * in_tensor_cores * 2.0**-13


def largest_error(
    C: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    scaling: Scaling,
) -> float:
    """Return the largest error of C relative to its bound; NaN counts as infinite.

    The reference is the fp64 product of the dequantised operands plus the bias. Rounding to the
    output's dtype adds one roundoff of the result to the error of the sum.
    """
    a, b = scaling.dequantised(A, B, torch.float64)
    expected, magnitudes = a @ b, a.abs() @ b.abs()
    if scaling.bias is not None:
        expected += scaling.bias.double()
        magnitudes += scaling.bias.double().abs()
    bound = error_of_sum(A.shape[1], C.is_cuda, scaling.use_fast_accum) * magnitudes
    bound += _ROUNDOFF[C.dtype] * expected.abs()
    # fp16 loses relative precision below its smallest normal number.
    bound += torch.finfo(C.dtype).smallest_normal * _ROUNDOFF[C.dtype]
    error = ((C.double() - expected).abs() / bound).nan_to_num(nan=float("inf"))
    return float(error.max())
