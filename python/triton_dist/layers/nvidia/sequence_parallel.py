"""Differentiable ops for attention over a sequence whose tokens are distributed over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from triton_dist.kernels.nvidia import (
    SPAttentionContext,
    UlyssesContext,
    sp_ag_attention,
    ulysses_gemm_pre_attn,
    ulysses_post_attn,
    ulysses_post_attn_gemm,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.sp_ag_attention import sp_ag_attention_backward


def pre_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: UlyssesContext,
    seq_lens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Exchange q, k and v before Ulysses attention, differentiably: from this rank's tokens to the
    whole sequence of this rank's heads. The backward pass sums the gradients of a KV head over
    the ranks that use this head. For arguments and errors see ``ulysses_pre_attn``."""
    result: tuple[torch.Tensor, ...] = _PreAttn.apply(q, k, v, ctx, seq_lens)  # type: ignore[no-untyped-call]
    return result


def post_attn(
    o: torch.Tensor, ctx: UlyssesContext, seq_lens: Sequence[int] | None = None
) -> torch.Tensor:
    """Exchange the output o after Ulysses attention, differentiably: return this rank's tokens for
    all heads. For arguments and errors see ``ulysses_post_attn``."""
    result: torch.Tensor = _PostAttn.apply(o, ctx, seq_lens)  # type: ignore[no-untyped-call]
    return result


class _PreAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, context: Any, seq_lens: Any) -> Any:
        ctx.context, ctx.seq_lens = context, seq_lens
        return ulysses_pre_attn(q, k, v, context, seq_lens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        dq, dk, dv = (each.contiguous() for each in (dq, dk, dv))
        return *ulysses_post_attn(dq, ctx.context, dk, dv, ctx.seq_lens), None, None


class _PostAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Any, context: Any, seq_lens: Any) -> Any:
        ctx.context, ctx.seq_lens = context, seq_lens
        return ulysses_post_attn(o.contiguous(), context, seq_lens=seq_lens)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> Any:
        rows = do.contiguous()
        return ulysses_pre_attn(rows, None, None, ctx.context, ctx.seq_lens)[0], None, None


def gemm_pre_attn(
    x: torch.Tensor,
    B: torch.Tensor,
    ctx: UlyssesContext,
    bias: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return ``ulysses_gemm_pre_attn``, differentiable. Each rank computes the gradients of B and
    bias for its tokens, so add them over ranks."""
    result: tuple[torch.Tensor, ...] = _GemmPreAttn.apply(x, B, bias, ctx, seq_lens)  # type: ignore[no-untyped-call]
    return result


def post_attn_gemm(
    o: torch.Tensor,
    B: torch.Tensor,
    ctx: UlyssesContext,
    bias: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return ``ulysses_post_attn_gemm``, differentiable. The backward repeats the exchange of o,
    and gradients are as in ``gemm_pre_attn``."""
    result: torch.Tensor = _PostAttnGemm.apply(o, B, bias, ctx, seq_lens)  # type: ignore[no-untyped-call]
    return result


class _GemmPreAttn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, B: Any, bias: Any, context: Any, seq_lens: Any) -> Any:
        ctx.context, ctx.seq_lens = context, seq_lens
        ctx.save_for_backward(x, B)
        return ulysses_gemm_pre_attn(x, B, context, bias, seq_lens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Any:
        (x, B), (dq, dk, dv) = ctx.saved_tensors, (each.contiguous() for each in (dq, dk, dv))
        gradients = ulysses_post_attn(dq, ctx.context, dk, dv, ctx.seq_lens)
        grad = torch.cat([each.flatten(2) for each in gradients], 2)
        return *_gradients(ctx.needs_input_grad, x, B, grad), None, None


class _PostAttnGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Any, B: Any, bias: Any, context: Any, seq_lens: Any) -> Any:
        ctx.context, ctx.seq_lens, o = context, seq_lens, o.contiguous()
        ctx.save_for_backward(o, B)
        return ulysses_post_attn_gemm(o, B, context, bias, seq_lens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (o, B), context, seq_lens = ctx.saved_tensors, ctx.context, ctx.seq_lens
        (rows,) = ulysses_post_attn(o, context, seq_lens=seq_lens)
        do, *others = _gradients((True, *ctx.needs_input_grad[1:]), rows.flatten(2), B, grad)
        do = do.view_as(rows)
        return ulysses_pre_attn(do, None, None, context, seq_lens)[0], *others, None, None


def _gradients(needed: Sequence[bool], x: Any, B: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Return the ``needed`` gradients of x, B and bias in ``x @ B + bias``."""
    rows = grad.flatten(0, 1)
    return (
        grad @ B.T if needed[0] else None,
        x.flatten(0, 1).T @ rows if needed[1] else None,
        rows.sum(0) if needed[2] else None,
    )


def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: SPAttentionContext, **options: Any
) -> torch.Tensor:
    """Return attention of this rank's q over the k and v of all ranks. Differentiable. ``options``
    are keyword arguments of ``sp_ag_attention``, which documents all arguments and errors."""
    result: torch.Tensor = _AGAttention.apply(q, k, v, ctx, options)  # type: ignore[no-untyped-call]
    return result


class _AGAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, context: Any, options: Any) -> Any:
        ctx.context, ctx.options = context, options
        out, lse = sp_ag_attention(q, k, v, context, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        options = {name: value for name, value in ctx.options.items() if name != "autotune"}
        q, k, v, out, lse = ctx.saved_tensors
        gradients = sp_ag_attention_backward(grad, q, k, v, out, lse, ctx.context, **options)
        return *gradients, None, None
