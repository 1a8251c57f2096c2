"""Differentiable grouped GEMMs across ranks: ``functional`` for mixture-of-experts layers.

    function       result                              gradient of the tokens
    ag_group_gemm  each token times the weights of     moe_reduce_rs(dC, B.mT)
                   its experts, for all ranks' tokens
    group_gemm     like ag_group_gemm, for tokens      moe_reduce_ar(dC, B.mT)
                   that all ranks have
    moe_reduce_rs  sums of this rank's tokens over     group_gemm(dY, weights.mT),
                   their experts and over ranks        each row times its route's weight
    moe_reduce_ar  sums of all tokens, on all ranks    like moe_reduce_rs

A route is a pair of a token and one of its topk experts. ``topk_weights`` has the weight of each
route in the token's sum. The gradient of an expert's weights is the sum of ``outer(row, gradient)``
over the expert's routes. The gradient of a route's weight is the dot product of the route's row of
x and the same row of ``dY @ weights.mT``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.rows import grouped_mm, has_library_kernel
from triton_dist.layers.nvidia.functional import call_method_or_custom_op, cast_for_autocast
from triton_dist.layers.nvidia.tensor_parallel import (
    Collectives,
    check_operand,
    collectives_by_name,
)


def ag_group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, collectives: Collectives
) -> torch.Tensor:
    """Return each token of all ranks times the weights of its experts. Differentiable.

    Args:
        A: [m, K], m tokens of this rank; fp16, bf16 or fp32.
        B: [E, K, n], this rank's columns of the weights of E experts, dtype of A.
        ids: [M, topk], int32 or int64, contiguous: experts of the M tokens of all ranks, equal on
            all ranks. An id outside 0 to E - 1 gives a row of zeros.
        collectives: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M * topk, n]; row ``t * topk + j`` is the product of token t and its expert ``ids[t, j]``.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
        ContextFinalized: ``collectives`` was finalized.
    """
    return _checked_call("ag_group_gemm", A, B, ids, collectives)


def group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, collectives: Collectives
) -> torch.Tensor:
    """Return ``ag_group_gemm`` for an A [M, K] that all ranks have.

    The gradient of A is summed over ranks.
    """
    return _checked_call("group_gemm", A, B, ids, collectives)


def moe_reduce_rs(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    collectives: Collectives,
) -> torch.Tensor:
    """Multiply each row by its expert's weights; return the weighted sums of this rank's tokens.

    A token's products are multiplied by ``topk_weights`` and summed over experts and ranks.
    Differentiable.

    Args:
        x: [M * topk, k], this rank's columns, in the row order of ``ag_group_gemm``'s result.
        weights: [E, k, N], this rank's rows of the experts' weights.
        ids: [M, topk], see ``ag_group_gemm``.
        topk_weights: [M, topk], fp16, bf16 or fp32, equal on all ranks. Each rank computes one
            addend of the gradient; the sum over ranks is the gradient.
        collectives: ``TensorParallel`` or ``Collectives``.

    Returns:
        [m, N], m = M / ranks.

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_group_gemm``.
    """
    return _checked_call("moe_reduce_rs", x, weights, ids, collectives, topk_weights)


def moe_reduce_ar(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    collectives: Collectives,
) -> torch.Tensor:
    """Return ``moe_reduce_rs`` of all tokens, [M, N], on every rank.

    All ranks must compute the same loss. The gradient of ``topk_weights`` is summed over ranks.
    """
    return _checked_call("moe_reduce_ar", x, weights, ids, collectives, topk_weights)


def _checked_call(
    function: str,
    A: torch.Tensor,
    B: torch.Tensor,
    ids: torch.Tensor,
    collectives: Collectives,
    *topk_weights: torch.Tensor,
) -> torch.Tensor:
    """Check the operands, cast them for autocast, and call the method of ``collectives``."""
    if B.ndim != 3 or ids.ndim != 2:
        shapes = tuple(B.shape), tuple(ids.shape)
        expected = "weights [E, K, N] and ids [M, topk]"
        raise InvalidArgument(function, "shapes of weights and ids", shapes, expected)
    A, B = cast_for_autocast(A, B, collectives)
    check_operand(function, "A", A, B[0], collectives)
    return call_method_or_custom_op(function, (A, B, ids, *topk_weights), collectives)


def weight_gradients(
    rows: torch.Tensor, grads: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return the gradients of the experts' weights, [E, K, N].

    Each is the sum of ``outer(row, gradient)`` over the expert's routes. Synchronises with the
    device unless torch has a native grouped GEMM (bf16 on Hopper).

    Args:
        rows: inputs, one per token [M, K] or one per route [M * topk, K].
        grads: gradients of the products, one per token [M, N] or one per route [M * topk, N].
        ids: [M, topk], expert of each route.
        num_experts: E.
    """
    flat = ids.flatten().long()
    expert_ids = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = expert_ids.argsort(stable=True)
    experts = torch.arange(num_experts, device=ids.device)
    ends = torch.searchsorted(expert_ids[order], experts, right=True)

    def rows_of_routes(matrix: torch.Tensor) -> torch.Tensor:
        return matrix[order if len(matrix) == len(flat) else order // ids.shape[1]]

    left, right = rows_of_routes(rows), rows_of_routes(grads)
    return weight_gradients_of_sorted_rows(left, right, ends.int())


def weight_gradients_of_sorted_rows(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return ``weight_gradients`` for inputs [R, K] and gradients [R, N] sorted by expert.

    ``ends``: int32 [E]; rows ``ends[e - 1]`` to ``ends[e] - 1`` belong to expert e.
    """
    is_fast = has_library_kernel() and left.dtype is torch.bfloat16
    if is_fast and left.shape[1] % 8 == 0 and right.shape[1] % 8 == 0:
        return grouped_mm(left.T, right, ends)
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        sums[expert] = left[begin:end].T @ right[begin:end]
        begin = end
    return sums


# Custom ops for torch. ``collectives_name`` is the name of a ``Collectives``.


_weight_gradients = torch.library.custom_op("triton_dist::weight_gradients", mutates_args=())(
    weight_gradients
)


@_weight_gradients.register_fake
def _(rows: Any, grads: Any, ids: Any, num_experts: int) -> Any:
    return rows.new_empty(num_experts, rows.shape[1], grads.shape[1])


def _define_product(name: str, sequence_parallel: bool) -> None:
    """Define the custom op of ``ag_group_gemm`` or ``group_gemm``."""

    def product(
        A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, collectives_name: str
    ) -> torch.Tensor:
        C: torch.Tensor = getattr(collectives_by_name(collectives_name), name)(A, B, ids)
        return C

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        A, B, ids, ctx.collectives_name = inputs
        ctx.save_for_backward(A, B, ids)

    @once_differentiable
    def backward(ctx: Any, dC: torch.Tensor) -> Any:
        A, B, ids = ctx.saved_tensors
        ops, dA, dB = torch.ops.triton_dist, None, None
        if ctx.needs_input_grad[0]:
            sum_of_routes = ops.moe_reduce_rs if sequence_parallel else ops.moe_reduce_ar
            ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
            dA = sum_of_routes(dC, B.mT, ids, ones, ctx.collectives_name)
        if ctx.needs_input_grad[1]:
            rows = ops.all_gather(A, ctx.collectives_name) if sequence_parallel else A
            dB = ops.weight_gradients(rows, dC, ids, len(B))
        return dA, dB, None, None

    op = torch.library.custom_op(f"triton_dist::{name}", product, mutates_args=())
    op.register_fake(lambda A, B, ids, collectives: A.new_empty(ids.numel(), B.shape[2]))
    op.register_autograd(backward, setup_context=setup)


def _define_reduction(name: str, sequence_parallel: bool) -> None:
    """Define the custom op of ``moe_reduce_rs`` or ``moe_reduce_ar``."""

    def sums(
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        topk_weights: torch.Tensor,
        collectives_name: str,
    ) -> torch.Tensor:
        Y: torch.Tensor = getattr(collectives_by_name(collectives_name), name)(
            x, weights, ids, topk_weights
        )
        return Y

    def fake(x: Any, weights: Any, ids: Any, topk_weights: Any, collectives_name: str) -> Any:
        shards = collectives_by_name(collectives_name).num_ranks if sequence_parallel else 1
        return x.new_empty(ids.shape[0] // shards, weights.shape[2])

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, weights, ids, topk_weights, ctx.collectives_name = inputs
        ctx.save_for_backward(x, weights, ids, topk_weights)

    @once_differentiable
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        x, weights, ids, topk_weights = ctx.saved_tensors
        needs_x, needs_weights, _, needs_topk_weights, _ = ctx.needs_input_grad
        ops, dx, dW, d_topk_weights = torch.ops.triton_dist, None, None, None
        rows = ops.all_gather(dY, ctx.collectives_name) if sequence_parallel else dY.contiguous()
        route_weights = topk_weights.reshape(-1, 1)
        # Rows of x without an expert may be NaN.
        has_expert = ((ids >= 0) & (ids < len(weights))).reshape(-1, 1)
        if needs_x or needs_topk_weights:
            products = ops.group_gemm(rows, weights.mT, ids, ctx.collectives_name)
        if needs_x:
            dx = torch.where(has_expert, products * route_weights, 0).to(x.dtype)
        if needs_topk_weights:
            dots = torch.where(has_expert, products.float() * x, 0).sum(-1)
            d_topk_weights = dots.view_as(topk_weights)
            if not sequence_parallel:
                d_topk_weights = ops.all_reduce(d_topk_weights, ctx.collectives_name)
            d_topk_weights = d_topk_weights.to(topk_weights.dtype)
        if needs_weights:
            dW = ops.weight_gradients((x * route_weights).to(x.dtype), rows, ids, len(weights))
        return dx, dW, None, d_topk_weights, None

    op = torch.library.custom_op(f"triton_dist::{name}", sums, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)


@torch.library.custom_op("triton_dist::all_reduce", mutates_args=())
def _all_reduce(addend: torch.Tensor, collectives_name: str) -> torch.Tensor:
    return collectives_by_name(collectives_name).all_reduce(addend.clone())


@_all_reduce.register_fake
def _(addend: Any, collectives_name: str) -> Any:
    return torch.empty_like(addend)


_define_product("ag_group_gemm", sequence_parallel=True)
_define_product("group_gemm", sequence_parallel=False)
_define_reduction("moe_reduce_rs", sequence_parallel=True)
_define_reduction("moe_reduce_ar", sequence_parallel=False)
