"""fp8 operands for tests: quantisation by recipe, and a bound of the error of a product."""

from __future__ import annotations

import torch

from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, Recipe, Scaling, num_scale_blocks

# Unit roundoffs of an output, with a margin for the rounding of the reference.
_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


def _block_maxima(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the largest magnitude of each block of ``rows`` by 128 elements."""
    down, along = -(-x.shape[0] // rows), num_scale_blocks(x.shape[1])
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
