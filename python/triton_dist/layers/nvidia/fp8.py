"""Serve with fp8 weights: quantise activations, and describe the scales of checkpoints.

Weights of two layouts are accepted, each a ``weight`` in ``float8_e4m3fn`` [N, K] with its scales:

* ``weight_scale_inv`` [N / 128, K / 128], one scale per block (DeepSeek-V3);
* ``weight_scale`` [N, 1], one scale per row (compressed-tensors).

Activations are quantised in each call, by the same recipe: one scale per row, or per 128 elements
of a row.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common.gemm.quantise import quantisation
from triton_dist.kernels.common.gemm.scales import blocks
from triton_dist.layers.nvidia.stock_weights import FP8
from triton_dist.layers.nvidia.tensor_parallel import Collectives, ranks_by_name

BLOCK_SCALES, ROW_SCALES = "weight_scale_inv", "weight_scale"
SCALES = "_scale"
"""End of the name of a layer's parameter that has the scales of another parameter."""


def scale_name(module: torch.nn.Module) -> str | None:
    """Return the name of the scales of a module with an fp8 weight, or ``None``."""
    if getattr(getattr(module, "weight", None), "dtype", None) is not FP8:
        return None
    return next((name for name in (BLOCK_SCALES, ROW_SCALES) if hasattr(module, name)), None)


def is_silu(function: object) -> bool:
    """Return whether an activation is SiLU, which ``quantise`` computes."""
    names = (getattr(function, "__name__", ""), type(function).__name__)
    return bool({"silu", "SiLU", "SiLUActivation"} & {*names})


@torch.library.custom_op("triton_dist::quantise", mutates_args=())
def quantise(x: torch.Tensor, is_block: bool, silu_mul: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, K] in fp8, and its scales in the layout of ``grouped_gemm``.

    With ``silu_mul``, x is [rows, 2 * K], and silu(left half) * right half is quantised.
    """
    out, scale = _quantised(x, is_block, silu_mul)
    if len(out):
        quantisation(x, out, scale, silu_mul).run()
    return out, scale


@quantise.register_fake
def _quantised(x: torch.Tensor, is_block: bool, silu_mul: bool) -> Any:
    """Return memory for the results of ``quantise``."""
    rows, K = len(x), x.shape[1] // (2 if silu_mul else 1)
    if is_block:
        scale = x.new_empty(blocks(K), rows, dtype=torch.float32).t()
    else:
        scale = x.new_empty(rows, dtype=torch.float32)
    return x.new_empty(rows, K, dtype=FP8), scale


def experts_product(
    function: str,
    A: tuple[torch.Tensor, torch.Tensor],
    B: tuple[torch.Tensor, torch.Tensor],
    routing: tuple[torch.Tensor, ...],
    out_dtype: torch.dtype,
    ranks: Collectives,
) -> torch.Tensor:
    """Return the product of a method of ``Collectives`` for experts, of fp8 operands.

    Args:
        function: ``"ag_group_gemm"``, ``"group_gemm"``, ``"moe_reduce_rs"`` or ``"moe_reduce_ar"``.
        A, B: operands, each with its scales.
        routing: ids, and weights of the choices for the last two functions.
        out_dtype: dtype of the result.
        ranks: ``TensorParallel`` or ``Collectives``.
    """
    product: torch.Tensor = _experts_product(
        function, [*A, *B], list(routing), out_dtype, ranks.name
    )
    return product


@torch.library.custom_op("triton_dist::fp8_experts_product", mutates_args=())
def _experts_product(
    function: str,
    operands: list[torch.Tensor],
    routing: list[torch.Tensor],
    out_dtype: torch.dtype,
    ranks: str,
) -> torch.Tensor:
    A, A_scale, B, B_scale = operands
    scaling = {"A_scale": A_scale, "B_scale": B_scale, "out_dtype": out_dtype}
    product: torch.Tensor = getattr(ranks_by_name(ranks), function)(A, B, *routing, **scaling)
    return product


@_experts_product.register_fake
def _(function: str, operands: Any, routing: Any, out_dtype: Any, ranks: str) -> Any:
    (M, topk), N = routing[0].shape, operands[2].shape[2]
    rows = M * topk
    if function.startswith("moe_reduce"):
        rows = M // (ranks_by_name(ranks).num_ranks if function.endswith("rs") else 1)
    return operands[0].new_empty(rows, N, dtype=out_dtype)
