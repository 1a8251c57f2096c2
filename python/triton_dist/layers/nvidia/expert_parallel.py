"""Differentiable mixture of experts that are distributed over ranks.

Dispatch sends each token to the ranks of its experts; combine sends back the token's weighted sum.
The backward pass dispatches the gradients of the sums and combines the gradients of the tokens:

    forward                             backward, from the last line to the first
    rows = dispatch(x)                  dx = combine(d_products @ gate_up.mT)
    products = rows @ gate_up           d_gate_up = rows.T @ d_products
    h = silu(gate) * up                 d_products and d_weight from dy @ down.mT
    out = combine(weight * (h @ down))  dy = dispatch(d_out), d_down = (weight * h).T @ dy

The backward pass recomputes ``rows`` and ``products`` unless ``keep_gathered`` is set. Dispatch
sorts the routes (pairs of a token and a chosen expert) by expert. The index of a route in this
order is its position (``kernels/common/moe/positions.py``). Results stay in this order, so every
product is a grouped GEMM without further routing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import num_scale_blocks
from triton_dist.kernels.common.moe.activation import silu_mul, silu_mul_backward
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.nvidia import grouped_gemm
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.layers.nvidia.experts import weight_gradients_of_sorted_rows
from triton_dist.layers.nvidia.fp8 import quantise
from triton_dist.layers.nvidia.functional import cast_for_autocast, is_eager_inference
from triton_dist.layers.nvidia.tensor_parallel import (
    TensorParallel,
    check_operand,
    collectives_by_name,
)


def ep_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    collectives: TensorParallel,
    max_tokens: int,
    *,
    keep_gathered: bool = False,
    exact_sizes: bool = False,
) -> torch.Tensor:
    """Return each token's weighted sum of ``(silu(x @ gate) * (x @ up)) @ down`` over its experts.

    Differentiable; collective. The host waits for the device only with ``exact_sizes``, or for the
    gradients of weights if torch has no native grouped GEMM.

    Args:
        x: [tokens, hidden], tokens of this rank, possibly 0 tokens; fp16, bf16 or fp32.
        ids: [tokens, topk], int32 or int64: experts of each token; -1: no expert.
        topk_weights: fp32 [tokens, topk], weights of the experts.
        gate_up: [E / ranks, hidden, 2 * I], weights of this rank's experts, dtype of x.
        down: [E / ranks, I, hidden], dtype of x.
        collectives: a ``TensorParallel``.
        max_tokens: largest number of tokens of any rank; all ranks must pass the same value.
        keep_gathered: keep the received tokens and the first products for the backward pass, which
            otherwise sends the tokens again and multiplies again.
        exact_sizes: read the number of received routes on the host and allocate memory for this
            number. The call then cannot be captured in a CUDA graph. Otherwise, memory is allocated
            for ``ranks * max_tokens * topk`` routes. Ignored in ``torch.compile``.

    Returns:
        [tokens, hidden].

    Raises:
        InvalidArgument: shapes, dtypes or devices do not match.
        ContextFinalized: ``collectives`` was finalized.
    """
    _, gate_up = cast_for_autocast(x, gate_up, collectives)
    x, down = cast_for_autocast(x, down, collectives)
    if gate_up.ndim != 3 or down.ndim != 3:
        shapes = tuple(gate_up.shape), tuple(down.shape)
        expected = "[E / ranks, hidden, 2 * I] and [E / ranks, I, hidden]"
        raise InvalidArgument("ep_experts", "shapes of gate_up and down", shapes, expected)
    check_operand("ep_experts", "x", x, gate_up[0], collectives)
    operands = x.contiguous(), ids.contiguous(), topk_weights.contiguous(), gate_up, down
    uses_exact_sizes = exact_sizes and not torch.compiler.is_compiling()
    if is_eager_inference(*operands):
        return _run_experts(*operands, collectives, max_tokens, uses_exact_sizes)[0]
    keep_intermediates = keep_gathered and torch.is_grad_enabled()
    out, _, _ = torch.ops.triton_dist.ep_experts(
        *operands, collectives.name, max_tokens, uses_exact_sizes, keep_intermediates
    )
    return out  # type: ignore[no-any-return]


def _run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    collectives: Any,
    max_tokens: int,
    uses_exact_sizes: bool,
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    received = _dispatch(x, ids, topk_weights, gate_up, collectives, max_tokens)
    positions = _positions(received, uses_exact_sizes)
    if keep_intermediates:
        rows = received.rows.clone()
        products = grouped_gemm(received.rows, gate_up, positions)
        hidden = silu_mul(products, positions)
    else:
        rows, products = x.new_empty(0), x.new_empty(0)
        hidden = grouped_gemm(received.rows, gate_up, positions, activation="silu_mul")
    y = grouped_gemm(hidden, down, positions.for_sorted_rows())
    return collectives.ep_combine(y, received), rows, products


def _dispatch(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    collectives: Any,
    max_tokens: int,
) -> Received:
    experts = len(gate_up) * collectives.num_ranks
    received: Received = collectives.ep_dispatch(
        x, ids, topk_weights, experts, x.dtype, max_tokens=max_tokens
    )
    return received


def _positions(received: Received, uses_exact_sizes: bool) -> Positions:
    positions = received.positions
    return positions.limited_to(received.num_positions()) if uses_exact_sizes else positions


@torch.library.custom_op("triton_dist::ep_experts", mutates_args=())
def _ep_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    collectives_name: str,
    max_tokens: int,
    uses_exact_sizes: bool,
    keep_intermediates: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    collectives = collectives_by_name(collectives_name)
    return _run_experts(
        x, ids, topk_weights, gate_up, down, collectives, max_tokens, uses_exact_sizes,
        keep_intermediates,
    )  # fmt: skip


@_ep_experts.register_fake
def _(x: Any, ids: Any, topk_weights: Any, gate_up: Any, down: Any, collectives_name: str,
      max_tokens: int, uses_exact_sizes: bool, keep_intermediates: bool) -> Any:  # fmt: skip
    rows = collectives_by_name(collectives_name).num_ranks * max_tokens
    if not keep_intermediates:
        return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
    products = x.new_empty(rows * ids.shape[1], gate_up.shape[2])
    return torch.empty_like(x), x.new_empty(rows, x.shape[1]), products


@torch.library.custom_op("triton_dist::ep_experts_backward", mutates_args=())
def _ep_experts_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor,
    products: torch.Tensor,
    collectives_name: str,
    max_tokens: int,
    uses_exact_sizes: bool,
    needs_weight_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, topk_weights, gate_up and down. The gradients of gate_up and down
    are empty tensors without ``needs_weight_gradients``."""
    collectives: Any = collectives_by_name(collectives_name)
    tokens = None

    def expanded(received: Received) -> torch.Tensor:
        return received.expanded(x.new_empty(positions.max_positions, x.shape[1]))[0]

    if not len(products):
        received = _dispatch(x, ids, topk_weights, gate_up, collectives, max_tokens)
        positions = _positions(received, uses_exact_sizes)
        products = grouped_gemm(received.rows, gate_up, positions)
        if needs_weight_gradients:  # before the next dispatch overwrites the rows
            tokens = expanded(received)
    received = _dispatch(dy.contiguous(), ids, topk_weights, gate_up, collectives, max_tokens)
    # ``products`` come from a dispatch of the same ids, so they have the same number of positions.
    positions = received.positions.limited_to(len(products))
    assert received.weights is not None
    weights = received.weights[: positions.max_positions]
    sorted_positions = positions.for_sorted_rows()
    grads = grouped_gemm(received.rows, down.mT, positions)
    weighted, d_products, d_weights = silu_mul_backward(products, grads, weights, positions)
    d_gate_up, d_down = x.new_empty(0), x.new_empty(0)
    if needs_weight_gradients:
        if tokens is None:
            tokens = expanded(replace(received, rows=rows))
        d_gate_up = weight_gradients_of_sorted_rows(tokens, d_products, positions.ends)
        d_down = weight_gradients_of_sorted_rows(weighted, expanded(received), positions.ends)
    positions_of_routes = received.position_of_route
    route_gradients = torch.where(
        positions_of_routes >= 0, d_weights[positions_of_routes.clamp(min=0)], 0
    )
    d_topk_weights = collectives.reduce_scatter(route_gradients)[: len(x)].to(topk_weights.dtype)
    dx = collectives.ep_combine(
        grouped_gemm(d_products, gate_up.mT, sorted_positions), received, False
    )
    return dx, d_topk_weights.clone(), d_gate_up, d_down


@_ep_experts_backward.register_fake
def _(dy: Any, x: Any, ids: Any, topk_weights: Any, gate_up: Any, down: Any, rows: Any,
      products: Any, collectives_name: str, max_tokens: int, uses_exact_sizes: bool,
      needs_weight_gradients: bool) -> Any:  # fmt: skip
    grads = [torch.empty_like(each) for each in (x, topk_weights)]
    for each in (gate_up, down):
        grads.append(each.new_empty(each.shape if needs_weight_gradients else 0))
    return tuple(grads)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.collectives_name, ctx.max_tokens, ctx.uses_exact_sizes, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])


@once_differentiable
def _backward(ctx: Any, dy: torch.Tensor | None, *_: Any) -> Any:
    if dy is None:
        return (None,) * 9
    needs = ctx.needs_input_grad
    options = ctx.collectives_name, ctx.max_tokens, ctx.uses_exact_sizes, needs[3] or needs[4]
    grads = torch.ops.triton_dist.ep_experts_backward(dy, *ctx.saved_tensors, *options)
    dx, d_topk_weights, d_gate_up, d_down = grads
    return (
        dx if needs[0] else None, None, d_topk_weights if needs[2] else None,
        d_gate_up if needs[3] else None, d_down if needs[4] else None, *(None,) * 4,
    )  # fmt: skip


_ep_experts.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("triton_dist::ep_experts_fp8", mutates_args=())
def ep_experts_fp8(
    x: torch.Tensor,
    ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: list[torch.Tensor],
    input_scales: list[torch.Tensor],
    is_block: bool,
    collectives_name: str,
    max_tokens: int,
    uses_exact_sizes: bool,
) -> torch.Tensor:
    """Return ``ep_experts`` for fp8 weights. Tokens are quantised before they are sent.

    Args:
        x, ids, topk_weights, max_tokens: see ``ep_experts``.
        weights: gate_up, scales of gate_up, down, scales of down.
        input_scales: static scales of the inputs of both products, or an empty list.
        is_block: weights and tokens have a scale per block of 128 elements, else per row.
        collectives_name: name of a ``TensorParallel``.
        uses_exact_sizes: ``exact_sizes`` of ``ep_experts``.
    """
    collectives: Any = collectives_by_name(collectives_name)
    gate_up, gate_up_scale, down, down_scale = weights
    static, static_down = input_scales or (None, None)
    experts, options = len(gate_up) * collectives.num_ranks, {"max_tokens": max_tokens}
    rows, x_scale = x, None
    if not is_block:
        rows, scale = quantise(x, False, False, static)
        scale = scale if static is None else static.max()  # quantise writes none for 0 tokens
        x_scale = scale.view(-1, 1).expand(len(x), num_scale_blocks(x.shape[1])).contiguous()
    received = collectives.ep_dispatch(
        rows, ids, topk_weights, experts, x.dtype, x_scale=x_scale, quantise=is_block, **options
    )
    A_scale = received.scales
    if not is_block:
        A_scale = A_scale[:, :1].contiguous() if static is None else static.max().view(1)
    positions = _positions(received, uses_exact_sizes)
    products = grouped_gemm(
        received.rows, gate_up, positions, A_scale=A_scale, B_scale=gate_up_scale,
        out_dtype=x.dtype,
    )  # fmt: skip
    hidden, hidden_scale = quantise(products, is_block, True, static_down, positions.ends[-1:])
    y = grouped_gemm(
        hidden, down, positions.for_sorted_rows(), A_scale=hidden_scale, B_scale=down_scale,
        out_dtype=x.dtype,
    )  # fmt: skip
    out: torch.Tensor = collectives.ep_combine(y, received)
    return out


@ep_experts_fp8.register_fake
def _(x: Any, ids: Any, topk_weights: Any, weights: Any, input_scales: Any, is_block: bool,
      collectives_name: str, max_tokens: int, uses_exact_sizes: bool) -> Any:  # fmt: skip
    return torch.empty_like(x)
