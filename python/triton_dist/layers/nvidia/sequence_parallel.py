"""Differentiable ops for attention over a sequence whose tokens are distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class _Differentiable(torch.autograd.Function):
    """Call ``forward(*inputs)``, which returns the result and the tensors to save.

    ``backward(saved, needs_grad, *grads)`` returns the gradients of the inputs. ``saved`` are the
    saved tensors, ``needs_grad`` has a bool for each input, and ``grads`` are the gradients of the
    result.
    """

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *inputs: Any) -> Any:
        result, saved = forward(*inputs)
        ctx.run_backward = backward
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grads = tuple(each.contiguous() for each in grads)
        return None, None, *ctx.run_backward(ctx.saved_tensors, ctx.needs_input_grad[2:], *grads)


_apply: Callable[..., Any] = _Differentiable.apply


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

    def backward(_: Any, needs_grad: Any, dq: Any, dk: Any, dv: Any) -> Any:
        return ulysses_post_attn(dq, ctx, dk, dv, seq_lens)

    result: tuple[torch.Tensor, ...] = _apply(
        lambda q, k, v: (ulysses_pre_attn(q, k, v, ctx, seq_lens), ()), backward, q, k, v
    )
    return result


def post_attn(
    o: torch.Tensor, ctx: UlyssesContext, seq_lens: Sequence[int] | None = None
) -> torch.Tensor:
    """Exchange the output o after Ulysses attention, differentiably: return this rank's tokens for
    all heads. For arguments and errors see ``ulysses_post_attn``."""
    result: torch.Tensor = _apply(
        lambda o: (ulysses_post_attn(o.contiguous(), ctx, seq_lens=seq_lens)[0], ()),
        lambda _, needs_grad, grad: ulysses_pre_attn(grad, None, None, ctx, seq_lens),
        o,
    )
    return result


def gemm_pre_attn(
    x: torch.Tensor,
    B: torch.Tensor,
    ctx: UlyssesContext,
    bias: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return ``ulysses_gemm_pre_attn``, differentiable. Each rank computes the gradients of B and
    bias for its tokens, so add them over ranks."""

    def forward(x: Any, B: Any, bias: Any) -> Any:
        return ulysses_gemm_pre_attn(x, B, ctx, bias, seq_lens), (x, B)

    def backward(saved: Any, needs_grad: Any, dq: Any, dk: Any, dv: Any) -> Any:
        gradients = ulysses_post_attn(dq, ctx, dk, dv, seq_lens)
        return _gradients(needs_grad, torch.cat([each.flatten(2) for each in gradients], 2), *saved)

    result: tuple[torch.Tensor, ...] = _apply(forward, backward, x, B, bias)
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

    def forward(o: Any, B: Any, bias: Any) -> Any:
        o = o.contiguous()
        return ulysses_post_attn_gemm(o, B, ctx, bias, seq_lens), (o, B)

    def backward(saved: Any, needs_grad: Any, grad: Any) -> Any:
        (o, B), (_, *others) = saved, needs_grad
        (rows,) = ulysses_post_attn(o, ctx, seq_lens=seq_lens)
        # All ranks take part in the exchange of the gradient of o, so each rank computes it.
        do, *gradients = _gradients((True, *others), grad, rows.flatten(2), B)
        (do,) = ulysses_pre_attn(do.view_as(rows), None, None, ctx, seq_lens)
        return do, *gradients

    result: torch.Tensor = _apply(forward, backward, o, B, bias)
    return result


def _gradients(needs_grad: Sequence[bool], grad: torch.Tensor, x: Any, B: Any) -> tuple[Any, ...]:
    """Return the gradients of x, B and bias in ``x @ B + bias``, ``None`` where ``needs_grad`` is
    false."""
    rows = grad.flatten(0, 1)
    return (
        grad @ B.T if needs_grad[0] else None,
        x.flatten(0, 1).T @ rows if needs_grad[1] else None,
        rows.sum(0) if needs_grad[2] else None,
    )


def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: SPAttentionContext, **options: Any
) -> torch.Tensor:
    """Return attention of this rank's q over the k and v of all ranks. Differentiable. ``options``
    are keyword arguments of ``sp_ag_attention``, which documents all arguments and errors."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        out, lse = sp_ag_attention(q, k, v, ctx, **options)
        return out, (q, k, v, out, lse)

    def backward(saved: Any, needs_grad: Any, grad: Any) -> Any:
        q, k, v, out, lse = saved
        # The backward is not tuned, so it does not take the tuner's keywords.
        others = {name: each for name, each in options.items() if not name.startswith("autotune")}
        return sp_ag_attention_backward(grad, q, k, v, out, lse, ctx, **others)

    result: torch.Tensor = _apply(forward, backward, q, k, v)
    return result
