"""Scales of fp8 operands for the OpInfos, and products of scaled operands by libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common.gemm.scales import (
    FP8,
    Recipe,
    Scaling,
    library_matmul,
    num_scale_blocks,
)
from triton_dist.kernels.common.libraries import all_gather_rows
from triton_dist.kernels.common.moe.rows import grouped_mm, scaled_grouped_mm
from triton_dist.kernels.common.moe.scales import OperandScales

Scales = dict[str, Any]
"""``A_scale`` and ``B_scale`` of fp8 operands; empty for other operands."""


def scales_of(operands: Mapping[str, torch.Tensor]) -> Scales:
    """Return the scales among the operands."""
    return {name: operands[name] for name in ("A_scale", "B_scale") if name in operands}


def new_scales(
    a: torch.Tensor, b: torch.Tensor, recipe: Recipe | None, generator: torch.Generator | None
) -> Scales:
    """Return scales for ``a`` [M, K] and ``b`` [K, N] or [E, K, N]; empty without a recipe. The
    scales of ``a`` are uninitialised. The scales of ``b`` are uniform random from 0.5 to 1."""
    (M, K), (*experts, _, N) = a.shape, b.shape
    shapes: dict[Recipe | None, tuple[Sequence[int], Sequence[int]]] = {
        Recipe.TENSOR: ((1,), experts or (1,)),
        Recipe.ROW: ((M,), (*experts, N)),
        Recipe.BLOCK: (
            (num_scale_blocks(K), M),
            (*experts, num_scale_blocks(N), num_scale_blocks(K)),
        ),
    }
    if recipe is None:
        return {}
    A_scale, B_scale = (torch.empty(tuple(shape), device=b.device) for shape in shapes[recipe])
    B_scale.uniform_(0.5, 1, generator=generator)
    return {"A_scale": A_scale.t() if recipe is Recipe.BLOCK else A_scale, "B_scale": B_scale}


def in_fp32(A: torch.Tensor, B: torch.Tensor, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [M, K] and B [K, N] in fp32, multiplied by their scales if there are any."""
    return Scaling(**scales).dequantised(A, B) if scales else (A.float(), B.float())


def select_rows(A: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return ``A[index]``, also for fp8, which not every device can index."""
    return A.view(torch.uint8)[index].view(A.dtype) if A.dtype in FP8 else A[index]


def scales_of_expert(scales: Scales, rows: torch.Tensor, expert: int) -> Scales:
    """Return the scales of rows ``rows`` of A and of the weights of one expert."""
    if not scales:
        return scales
    a, b = scales["A_scale"], scales["B_scale"]
    if a.ndim == 2:
        a = a.t()[:, rows].t()
    elif len(a) > 1:
        a = a[rows]
    return {"A_scale": a, "B_scale": b[expert : expert + 1] if b.ndim == 1 else b[expert]}


def gather_with_scales(
    A: torch.Tensor, scales: Scales, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, Scales]:
    """Gather the rows of A of all ranks, and their scales, by the group's collective."""
    if not scales:
        return all_gather_rows(A, group), scales
    # Neither NCCL nor gloo gathers every fp8 dtype.
    rows = all_gather_rows(A.view(torch.uint8), group).view(A.dtype)
    scale = scales["A_scale"]
    if scale.ndim == 2:
        by_rank = all_gather_rows(scale.t(), group).view(-1, *scale.t().shape)
        scale = torch.cat(tuple(by_rank), 1).t()  # column-major
    else:  # each rank has its own scale: repeat it for each of the rank's rows
        scale = all_gather_rows(scale.expand(len(A)).contiguous(), group)
    return rows, {**scales, "A_scale": scale}


def multiply(
    A: torch.Tensor, B: torch.Tensor, scales: Scales, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``A @ B`` by torch, in ``out`` or new memory."""
    return library_matmul(A, B, Scaling(**scales), out)


def grouped_mm_call(
    A: torch.Tensor, B: torch.Tensor, ends: torch.Tensor, order: torch.Tensor, scales: Scales
) -> Callable[[], torch.Tensor]:
    """Return a call of torch's grouped GEMM of ``A[order]`` and B [E, K, N]. Rows of ``A[order]``
    are sorted by expert; ``ends`` has the end of each expert's rows."""
    rows = select_rows(A, order)
    if not scales:
        return lambda: grouped_mm(rows, B, ends)
    scales = {**scales_for_grouped_mm(A, B, scales)}
    if len(scales["A_scale"]) > 1:
        scales["A_scale"] = scales["A_scale"][order]
    operand_scales = OperandScales.of(rows, B, Scaling(**scales))
    assert operand_scales is not None
    return lambda: scaled_grouped_mm(rows, B, ends, operand_scales, torch.bfloat16, False)


def scales_for_grouped_mm(A: torch.Tensor, B: torch.Tensor, scales: Scales) -> Scales:
    """Return scales in a layout that torch's grouped GEMM supports on Hopper. Row-wise scales of 1
    replace block-wise scales. The result then differs, so use it for timing only."""
    if not scales or scales["A_scale"].ndim == 1:
        return scales
    ones = scales["B_scale"].new_ones
    return {"A_scale": ones(len(A)), "B_scale": ones(len(B), B.shape[2])}
