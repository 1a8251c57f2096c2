"""Products of experts across ranks that have gradients: as ``functional``, for the rows of a
mixture-of-experts layer.

    product                                            gradient of rows           of weights
    ag_group_gemm  routes of all tokens, each times    moe_reduce_rs(dC, B.mT)    sums of
                   the weights of its expert                                      rows x gradient,
    group_gemm     the same; all ranks have all        moe_reduce_ar(dC, B.mT)    one an expert
    moe_reduce_rs  own tokens' sums over choices       group_gemm(dC, B.mT),
                   and ranks                           each row scaled
    moe_reduce_ar  all tokens', on all ranks           the same

Scales of choices have a gradient too: a route's product times the gradient of its token. A route's
product is made again for it in the backward, as that is the gradient of its row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.rows import grouped_mm, has_fast_library
from triton_dist.layers.nvidia.functional import dispatched, in_autocast
from triton_dist.layers.nvidia.tensor_parallel import Collectives, check_operand, named


def ag_group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: Collectives
) -> torch.Tensor:
    """Each token of all ranks times the weights of its experts, differentiable.

    Args:
        A: [m, K], this rank's tokens. B: [E, K, n], this rank's columns of the experts' weights.
            One dtype: fp16, bf16 or fp32.
        ids: [M, topk], int32 or int64, contiguous: the experts of all ranks' tokens, the same on
            all ranks. One that is not 0 to E - 1 gives a row of zeros.
        ranks: a ``TensorParallel``, or ``Collectives``.

    Returns:
        [M * topk, n], row ``t * topk + j`` for choice j of token t.

    Raises:
        InvalidArgument, ContextFinalized: before anything is launched.
    """
    return _called("ag_group_gemm", A, B, ids, ranks)


def group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: Collectives
) -> torch.Tensor:
    """The same for an A [M, K] that all ranks have; its gradient is summed over ranks."""
    return _called("group_gemm", A, B, ids, ranks)


def moe_reduce_rs(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    ranks: Collectives,
) -> torch.Tensor:
    """This rank's tokens of the sum, over ranks and choices, of ``scales * (x @ weights of the
    expert)``, differentiable.

    Args:
        x: [M * topk, k], a row for each route. weights: [E, k, N]. ids, scales: [M, topk]; scales
            of fp16, bf16 or fp32, this rank's copy: its gradient is this rank's part.

    Returns:
        [m, N]. Errors: as of ``ag_group_gemm``.
    """
    return _called("moe_reduce_rs", x, weights, ids, ranks, scales)


def moe_reduce_ar(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    ranks: Collectives,
) -> torch.Tensor:
    """The same of all tokens, on every rank, [M, N]; all ranks have the same loss, and the gradient
    of ``scales`` is summed over them."""
    return _called("moe_reduce_ar", x, weights, ids, ranks, scales)


def _called(
    function: str,
    A: torch.Tensor,
    B: torch.Tensor,
    ids: torch.Tensor,
    ranks: Collectives,
    *scales: torch.Tensor,
) -> torch.Tensor:
    """Check the operands, convert them to autocast's dtype, and call the method of ``ranks``."""
    if B.ndim != 3 or ids.ndim != 2:
        shapes = tuple(B.shape), tuple(ids.shape)
        expected = "weights [E, K, N] and ids [M, topk]"
        raise InvalidArgument(function, "shapes of weights and ids", shapes, expected)
    A, B = in_autocast(A, B, ranks)
    check_operand(function, "A", A, B[0], ranks)
    return dispatched(function, (A, B, ids, *scales), ranks)


def expert_sums(
    rows: torch.Tensor, grads: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Gradients of the experts' weights, [E, K, N]: the sum over an expert's routes of
    ``outer(row, gradient)``.

    rows: [M, K] or [M * topk, K]; grads: likewise, of N columns; ids: [M, topk]. Waits for the
    device where torch has no grouped product of its own, for any dtype but bf16 on Hopper.
    """
    flat = ids.flatten().long()
    known = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = known.argsort(stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(known[order], experts, right=True)

    def of_routes(matrix: torch.Tensor) -> torch.Tensor:
        return matrix[order if len(matrix) == len(flat) else order // ids.shape[1]]

    left, right = of_routes(rows), of_routes(grads)
    is_fast = has_fast_library() and rows.dtype is torch.bfloat16
    if is_fast and left.shape[1] % 8 == 0 and right.shape[1] % 8 == 0:
        return grouped_mm(left.T, right, ends.int())
    sums = rows.new_zeros(num_experts, left.shape[1], right.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        sums[expert] = left[begin:end].T @ right[begin:end]
        begin = end
    return sums


# What torch sees. ``ranks`` is the name of a ``Collectives``.


@torch.library.custom_op("triton_dist::ag_group_gemm", mutates_args=())
def _ag_group_gemm(A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: str) -> torch.Tensor:
    return named(ranks).ag_group_gemm(A, B, ids)


@torch.library.custom_op("triton_dist::group_gemm", mutates_args=())
def _group_gemm(A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: str) -> torch.Tensor:
    return named(ranks).group_gemm(A, B, ids)


@torch.library.custom_op("triton_dist::moe_reduce_rs", mutates_args=())
def _moe_reduce_rs(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, ranks: str
) -> torch.Tensor:
    return named(ranks).moe_reduce_rs(x, weights, ids, scales)


@torch.library.custom_op("triton_dist::moe_reduce_ar", mutates_args=())
def _moe_reduce_ar(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, ranks: str
) -> torch.Tensor:
    return named(ranks).moe_reduce_ar(x, weights, ids, scales)


_expert_sums = torch.library.custom_op("triton_dist::expert_sums", mutates_args=())(expert_sums)


@_ag_group_gemm.register_fake
@_group_gemm.register_fake
def _(A: Any, B: Any, ids: Any, ranks: str) -> Any:
    return A.new_empty(ids.shape[0] * ids.shape[1], B.shape[2])


@_moe_reduce_rs.register_fake
def _(x: Any, weights: Any, ids: Any, scales: Any, ranks: str) -> Any:
    return x.new_empty(ids.shape[0] // named(ranks).num_ranks, weights.shape[2])


@_moe_reduce_ar.register_fake
def _(x: Any, weights: Any, ids: Any, scales: Any, ranks: str) -> Any:
    return x.new_empty(ids.shape[0], weights.shape[2])


@_expert_sums.register_fake
def _(rows: Any, grads: Any, ids: Any, num_experts: int) -> Any:
    return rows.new_empty(num_experts, rows.shape[1], grads.shape[1])


def _setup_first(ctx: Any, inputs: Any, output: Any) -> None:
    A, B, ids, ctx.ranks = inputs
    ctx.save_for_backward(A, B, ids)


def _setup_last(ctx: Any, inputs: Any, output: Any) -> None:
    x, weights, ids, scales, ctx.ranks = inputs
    ctx.save_for_backward(x, weights, ids, scales)


def _backward_first(is_spread: bool) -> Any:
    @once_differentiable
    def backward(ctx: Any, dC: torch.Tensor) -> Any:
        A, B, ids = ctx.saved_tensors
        ops, dA, dB = torch.ops.triton_dist, None, None
        if ctx.needs_input_grad[0]:
            sum_of_routes = ops.moe_reduce_rs if is_spread else ops.moe_reduce_ar
            ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
            dA = sum_of_routes(dC, B.mT, ids, ones, ctx.ranks)
        if ctx.needs_input_grad[1]:
            rows = ops.all_gather(A, ctx.ranks) if is_spread else A
            dB = ops.expert_sums(rows, dC, ids, len(B))
        return dA, dB, None, None

    return backward


def _backward_last(is_spread: bool) -> Any:
    @once_differentiable
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        x, weights, ids, scales = ctx.saved_tensors
        needs_x, needs_weights, _, needs_scales, _ = ctx.needs_input_grad
        ops, dx, dW, d_scales = torch.ops.triton_dist, None, None, None
        rows = ops.all_gather(dY, ctx.ranks) if is_spread else dY.contiguous()
        scale = scales.reshape(-1, 1)
        known = ((ids >= 0) & (ids < len(weights))).reshape(-1, 1)  # others add nothing, not NaN
        if needs_x or needs_scales:
            products = ops.group_gemm(rows, weights.mT, ids, ctx.ranks)
            dx = torch.where(known, products * scale, 0).to(x.dtype) if needs_x else None
        if needs_scales:
            d_scales = torch.where(known, products.float() * x, 0).sum(-1).view_as(scales)
            d_scales = d_scales if is_spread else ops.all_reduce(d_scales, ctx.ranks)
            d_scales = d_scales.to(scales.dtype)
        if needs_weights:
            dW = ops.expert_sums((x * scale).to(x.dtype), rows, ids, len(weights))
        return dx, dW, None, d_scales, None

    return backward


@torch.library.custom_op("triton_dist::all_reduce", mutates_args=())
def _all_reduce(addend: torch.Tensor, ranks: str) -> torch.Tensor:
    return named(ranks).all_reduce(addend.clone())


@_all_reduce.register_fake
def _(addend: Any, ranks: str) -> Any:
    return torch.empty_like(addend)


_ag_group_gemm.register_autograd(_backward_first(True), setup_context=_setup_first)
_group_gemm.register_autograd(_backward_first(False), setup_context=_setup_first)
_moe_reduce_rs.register_autograd(_backward_last(True), setup_context=_setup_last)
_moe_reduce_ar.register_autograd(_backward_last(False), setup_context=_setup_last)
