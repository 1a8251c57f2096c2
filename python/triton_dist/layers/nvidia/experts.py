"""Differentiable grouped GEMMs across ranks: ``functional`` for mixture-of-experts layers.

    function       result                              gradient of the rows of A or x
    ag_group_gemm  routes of all tokens, each times    moe_reduce_rs(dC, B.mT)
                   the weights of its expert
    group_gemm     like ag_group_gemm, for tokens      moe_reduce_ar(dC, B.mT)
                   that all ranks have
    moe_reduce_rs  sums of this rank's tokens over     group_gemm(dY, weights.mT),
                   choices and ranks                   each row times its scale
    moe_reduce_ar  sums of all tokens, on all ranks    like moe_reduce_rs

The gradient of an expert's weights is the sum of ``outer(row, gradient)`` over its routes. The
gradient of a route's scale is the dot product of its row of x and of ``dY @ weights.mT``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.moe.rows import grouped_mm, has_fast_library
from triton_dist.layers.nvidia.functional import cast_for_autocast, dispatch
from triton_dist.layers.nvidia.tensor_parallel import Collectives, check_operand, ranks_by_name


def ag_group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: Collectives
) -> torch.Tensor:
    """Return each token of all ranks times the weights of its experts. Differentiable.

    Args:
        A: [m, K], tokens of this rank; fp16, bf16 or fp32.
        B: [E, K, n], this rank's columns of the experts' weights, dtype of A.
        ids: [M, topk], int32 or int64, contiguous: experts of all ranks' tokens, equal on all
            ranks. An id outside 0 to E - 1 gives a row of zeros.
        ranks: ``TensorParallel`` or ``Collectives``.

    Returns:
        [M * topk, n]; row ``t * topk + j`` is choice j of token t.

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
        ContextFinalized: ``ranks`` was finalized.
    """
    return _checked_call("ag_group_gemm", A, B, ids, ranks)


def group_gemm(
    A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: Collectives
) -> torch.Tensor:
    """Return ``ag_group_gemm`` for an A [M, K] that all ranks have; sum A's gradient over ranks."""
    return _checked_call("group_gemm", A, B, ids, ranks)


def moe_reduce_rs(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    ranks: Collectives,
) -> torch.Tensor:
    """Sum ``scales * (x @ weights)`` over choices and ranks; return the rows of this rank's tokens.

    Differentiable. ``weights`` of a route are the weights of its expert.

    Args:
        x: [M * topk, k], one row per route.
        weights: [E, k, N].
        ids: [M, topk], see ``ag_group_gemm``.
        scales: [M, topk], fp16, bf16 or fp32. Each rank gets one addend of its gradient.
        ranks: ``TensorParallel`` or ``Collectives``.

    Returns:
        [m, N].

    Raises:
        InvalidArgument, ContextFinalized: see ``ag_group_gemm``.
    """
    return _checked_call("moe_reduce_rs", x, weights, ids, ranks, scales)


def moe_reduce_ar(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor,
    ranks: Collectives,
) -> torch.Tensor:
    """Return ``moe_reduce_rs`` of all tokens, [M, N], on every rank.

    All ranks must compute the same loss. The gradient of ``scales`` is summed over ranks.
    """
    return _checked_call("moe_reduce_ar", x, weights, ids, ranks, scales)


def _checked_call(
    function: str,
    A: torch.Tensor,
    B: torch.Tensor,
    ids: torch.Tensor,
    ranks: Collectives,
    *scales: torch.Tensor,
) -> torch.Tensor:
    """Check the operands, cast them for autocast, and call the method of ``ranks``."""
    if B.ndim != 3 or ids.ndim != 2:
        shapes = tuple(B.shape), tuple(ids.shape)
        expected = "weights [E, K, N] and ids [M, topk]"
        raise InvalidArgument(function, "shapes of weights and ids", shapes, expected)
    A, B = cast_for_autocast(A, B, ranks)
    check_operand(function, "A", A, B[0], ranks)
    return dispatch(function, (A, B, ids, *scales), ranks)


def expert_sums(
    rows: torch.Tensor, grads: torch.Tensor, ids: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Return the gradients of the experts' weights, [E, K, N].

    Each is the sum of ``outer(row, gradient)`` over the expert's routes. Synchronises with the
    device unless torch has a native grouped GEMM (bf16 on Hopper).

    Args:
        rows: [M, K] or [M * topk, K].
        grads: [M, N] or [M * topk, N].
        ids: [M, topk].
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
    return sums_of_sorted_rows(left, right, ends.int())


def sums_of_sorted_rows(
    left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Return ``expert_sums`` of rows [R, K] and gradients [R, N] that are sorted by expert.

    ``ends``: int32 [E], end of the rows of each expert.
    """
    is_fast = has_fast_library() and left.dtype is torch.bfloat16
    if is_fast and left.shape[1] % 8 == 0 and right.shape[1] % 8 == 0:
        return grouped_mm(left.T, right, ends)
    sums = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        sums[expert] = left[begin:end].T @ right[begin:end]
        begin = end
    return sums


# Custom ops for torch. ``ranks`` is the name of a ``Collectives``.


_expert_sums = torch.library.custom_op("triton_dist::expert_sums", mutates_args=())(expert_sums)


@_expert_sums.register_fake
def _(rows: Any, grads: Any, ids: Any, num_experts: int) -> Any:
    return rows.new_empty(num_experts, rows.shape[1], grads.shape[1])


def _define_product(name: str, sequence_parallel: bool) -> None:
    """Define the custom op of ``ag_group_gemm`` or ``group_gemm``."""

    def product(A: torch.Tensor, B: torch.Tensor, ids: torch.Tensor, ranks: str) -> torch.Tensor:
        C: torch.Tensor = getattr(ranks_by_name(ranks), name)(A, B, ids)
        return C

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        A, B, ids, ctx.ranks = inputs
        ctx.save_for_backward(A, B, ids)

    @once_differentiable
    def backward(ctx: Any, dC: torch.Tensor) -> Any:
        A, B, ids = ctx.saved_tensors
        ops, dA, dB = torch.ops.triton_dist, None, None
        if ctx.needs_input_grad[0]:
            sum_of_routes = ops.moe_reduce_rs if sequence_parallel else ops.moe_reduce_ar
            ones = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
            dA = sum_of_routes(dC, B.mT, ids, ones, ctx.ranks)
        if ctx.needs_input_grad[1]:
            rows = ops.all_gather(A, ctx.ranks) if sequence_parallel else A
            dB = ops.expert_sums(rows, dC, ids, len(B))
        return dA, dB, None, None

    op = torch.library.custom_op(f"triton_dist::{name}", product, mutates_args=())
    op.register_fake(lambda A, B, ids, ranks: A.new_empty(ids.numel(), B.shape[2]))
    op.register_autograd(backward, setup_context=setup)


def _define_reduction(name: str, sequence_parallel: bool) -> None:
    """Define the custom op of ``moe_reduce_rs`` or ``moe_reduce_ar``."""

    def sums(
        x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, ranks: str
    ) -> torch.Tensor:
        Y: torch.Tensor = getattr(ranks_by_name(ranks), name)(x, weights, ids, scales)
        return Y

    def fake(x: Any, weights: Any, ids: Any, scales: Any, ranks: str) -> Any:
        shards = ranks_by_name(ranks).num_ranks if sequence_parallel else 1
        return x.new_empty(ids.shape[0] // shards, weights.shape[2])

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        x, weights, ids, scales, ctx.ranks = inputs
        ctx.save_for_backward(x, weights, ids, scales)

    @once_differentiable
    def backward(ctx: Any, dY: torch.Tensor) -> Any:
        x, weights, ids, scales = ctx.saved_tensors
        needs_x, needs_weights, _, needs_scales, _ = ctx.needs_input_grad
        ops, dx, dW, d_scales = torch.ops.triton_dist, None, None, None
        rows = ops.all_gather(dY, ctx.ranks) if sequence_parallel else dY.contiguous()
        scale = scales.reshape(-1, 1)
        has_expert = ((ids >= 0) & (ids < len(weights))).reshape(-1, 1)  # other rows may be NaN
        if needs_x or needs_scales:
            products = ops.group_gemm(rows, weights.mT, ids, ctx.ranks)
            dx = torch.where(has_expert, products * scale, 0).to(x.dtype) if needs_x else None
        if needs_scales:
            d_scales = torch.where(has_expert, products.float() * x, 0).sum(-1).view_as(scales)
            d_scales = d_scales if sequence_parallel else ops.all_reduce(d_scales, ctx.ranks)
            d_scales = d_scales.to(scales.dtype)
        if needs_weights:
            dW = ops.expert_sums((x * scale).to(x.dtype), rows, ids, len(weights))
        return dx, dW, None, d_scales, None

    op = torch.library.custom_op(f"triton_dist::{name}", sums, mutates_args=())
    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup)


@torch.library.custom_op("triton_dist::all_reduce", mutates_args=())
def _all_reduce(addend: torch.Tensor, ranks: str) -> torch.Tensor:
    return ranks_by_name(ranks).all_reduce(addend.clone())


@_all_reduce.register_fake
def _(addend: Any, ranks: str) -> Any:
    return torch.empty_like(addend)


_define_product("ag_group_gemm", sequence_parallel=True)
_define_product("group_gemm", sequence_parallel=False)
_define_reduction("moe_reduce_rs", sequence_parallel=True)
_define_reduction("moe_reduce_ar", sequence_parallel=False)
