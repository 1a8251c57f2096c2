"""Serve with fp8 weights: quantise activations, and describe the scales of checkpoints.

A module has a ``weight`` in ``float8_e4m3fn`` [N, K] and one of two kinds of scales:

* ``weight_scale_inv`` [N / 128, K / 128], one scale per block (DeepSeek-V3);
* ``weight_scale`` [N, 1], one scale per row, or one element (compressed-tensors).

Each call quantises its activations, with scales per block or per row like the weights. If the
module has a static ``input_scale`` (one element) next to ``weight_scale``, this scale is used.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from triton_dist.kernels.common.gemm.quantise import quantise_launch
from triton_dist.kernels.common.gemm.scales import num_scale_blocks
from triton_dist.kernels.nvidia import matmul
from triton_dist.layers.nvidia.stock_weights import E4M3
from triton_dist.layers.nvidia.tensor_parallel import collectives_by_name

_BLOCK_SCALES, _ROW_SCALES = "weight_scale_inv", "weight_scale"
_INPUT_SCALE = "input_scale"
SCALES, INPUT_SCALES = "_scale", "_input_scale"
"""Suffixes of parameter names: ``wo_scale`` has the scales of ``wo``, ``wo_input_scale`` the static
scales of its input."""


class WeightScales(NamedTuple):
    """Layout of the scales of fp8 weights in a checkpoint.

    Attributes:
        name: name of the scales in a module.
        scalar_shape: shape of the scale if each weight has only one scale, else ``None``.
        input_shape: shape of the input's static scale, or ``None``.
    """

    name: str
    scalar_shape: torch.Size | None
    input_shape: torch.Size | None

    @property
    def is_block(self) -> bool:
        return self.name == _BLOCK_SCALES

    @classmethod
    def of(cls, module: torch.nn.Module) -> WeightScales | None:
        """Return the layout of a module with an fp8 weight, or ``None``."""
        if getattr(getattr(module, "weight", None), "dtype", None) is not E4M3:
            return None
        if hasattr(module, _BLOCK_SCALES):
            return cls(_BLOCK_SCALES, None, None)
        scale, static = (getattr(module, name, None) for name in (_ROW_SCALES, _INPUT_SCALE))
        if scale is None:
            return None
        scalar_shape = scale.shape if scale.numel() == 1 else None
        return cls(_ROW_SCALES, scalar_shape, None if static is None else static.shape)


def is_silu(function: object) -> bool:
    """Return whether an activation is SiLU, which ``quantise`` computes."""
    names = (getattr(function, "__name__", ""), type(function).__name__)
    return bool({"silu", "SiLU", "SiLUActivation"} & {*names})


@torch.library.custom_op("triton_dist::quantise", mutates_args=())
def quantise(
    x: torch.Tensor,
    is_block: bool,
    silu_mul: bool,
    static_scale: torch.Tensor | None = None,
    used_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, K] in fp8, and its scales in the layout of the GEMMs.

    Args:
        x: [rows, K]; with ``silu_mul``, [rows, 2 * K].
        is_block: compute a scale per 128 elements of a row, else per row.
        silu_mul: quantise silu(left half of x) * right half of x.
        static_scale: scales to use instead of computed scales; only the largest element is used.
        used_rows: int32 tensor, number of rows to quantise; ``None``: all.
    """
    out, scale = _quantised(x, is_block, silu_mul, static_scale)
    if len(out):
        x = x if x.stride(1) == 1 else x.contiguous()
        quantise_launch(x, out, scale, silu_mul, static_scale, used_rows).run()
    return out, scale


@quantise.register_fake
def _quantised(
    x: torch.Tensor,
    is_block: bool,
    silu_mul: bool,
    static_scale: torch.Tensor | None = None,
    used_rows: torch.Tensor | None = None,
) -> Any:
    """Allocate the results of ``quantise``."""
    rows, K = len(x), x.shape[1] // (2 if silu_mul else 1)
    if is_block:
        scale = x.new_empty(num_scale_blocks(K), rows, dtype=torch.float32).t()
    else:
        scale = x.new_empty(rows if static_scale is None else 1, dtype=torch.float32)
    return x.new_empty(rows, K, dtype=E4M3), scale


@torch.library.custom_op("triton_dist::fp8_product", mutates_args=())
def fp8_product(
    function: str,
    operands: list[torch.Tensor],
    routing: list[torch.Tensor],
    out_dtype: torch.dtype,
    collectives_name: str,
) -> torch.Tensor:
    """Return the product of fp8 operands, computed by a method of ``Collectives``.

    Args:
        function: name of the method, such as ``"gemm_rs"``.
        operands: A, scales of A, B, scales of B.
        routing: for MoE methods: expert ids [M, topk]; methods that sum over a token's experts
            also take their weights [M, topk].
        out_dtype: dtype of the result.
        collectives_name: name of a ``TensorParallel`` or ``Collectives``.
    """
    A, A_scale, B, B_scale = operands
    scaling = {"A_scale": A_scale, "B_scale": B_scale, "out_dtype": out_dtype}
    return collectives_by_name(collectives_name).multiply_fp8(function, [A, B, *routing], scaling)


@fp8_product.register_fake
def _(function: str, operands: Any, routing: Any, out_dtype: Any, collectives_name: str) -> Any:
    A, N = operands[0], operands[2].shape[-1]
    num_ranks = collectives_by_name(collectives_name).num_ranks
    rows = len(A) * (num_ranks if function == "ag_gemm" else 1)
    if routing:
        rows = len(routing[0]) if function.startswith("moe_reduce") else routing[0].numel()
    if function.endswith("_rs"):
        rows = rows // num_ranks
    return A.new_empty(rows, N, dtype=out_dtype)


@torch.library.custom_op("triton_dist::fp8_linear", mutates_args=())
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    is_block: bool,
    static_scale: torch.Tensor | None,
) -> torch.Tensor:
    """Return ``x @ weight.T`` for x [rows, K], on this rank alone.

    Args:
        weight, scale: [N, K] and its scales, as in a checkpoint.
        is_block, static_scale: see ``quantise``.
    """
    if not len(x):
        return x.new_empty(0, len(weight))
    A, A_scale = quantise(x, is_block, False, static_scale)
    out: torch.Tensor = matmul(A, weight.mT, A_scale=A_scale, B_scale=scale, out_dtype=x.dtype)
    return out


@fp8_linear.register_fake
def _(x: Any, weight: Any, scale: Any, is_block: bool, static_scale: Any) -> Any:
    return x.new_empty(len(x), len(weight))


class Fp8Linear(torch.nn.Module):
    """A linear layer with the parameters and buffers of an fp8 module. It has no backward."""

    def __init__(self, source: torch.nn.Module, scales: WeightScales) -> None:
        super().__init__()
        self._scales = scales
        for name, parameter in source.named_parameters(recurse=False):
            parameter.requires_grad_(name == "bias" and parameter.requires_grad)
            self.register_parameter(name, parameter)
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, static = getattr(self, self._scales.name), getattr(self, _INPUT_SCALE, None)
        is_block, rows = self._scales.is_block, x.flatten(0, -2)
        y: torch.Tensor = fp8_linear(rows, self.weight, scale, is_block, static)
        bias = getattr(self, "bias", None)
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[1])


def with_fp8_linears(module: torch.nn.Module) -> torch.nn.Module:
    """Return ``module``, whose fp8 modules are replaced by ``Fp8Linear``."""
    scales = WeightScales.of(module)
    if scales is not None:
        return Fp8Linear(module, scales)
    for name, child in module.named_children():
        setattr(module, name, with_fp8_linears(child))
    return module
