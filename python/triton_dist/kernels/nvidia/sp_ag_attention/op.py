"""AllGather-attention: attention over a sequence that ranks share, without exchanging heads.

Each rank has its part of q, k and v. Copy engines push k and v of every rank to all others while a
library computes attention over the part that is here. A one-block kernel then waits for the next
part, the library attends to it, and a small kernel merges the results by their log-sum-exps.

Timeline of one call (W = 3):
    main stream  ─┬─ own part │ wait, part of rank+1, merge │ wait, part of rank+2, merge ─┬─ end
    copy streams  └─ k, v → rank-1, flag │ k, v → rank-2, flag ────────────────────────────┘

A causal sequence is balanced by zig-zag order: of 2 W chunks, rank r has the chunks r and
2 W - 1 - r. All queries of a rank then attend to the first chunk of each earlier rank, and its
second chunk attends to both chunks of each later rank, so every rank has equal work and each part
is one call of the library.

The backward gathers k and v again in this way. Gradients of k and v return by reduce-scatter.

Algorithms:
    * ``"copy_engine"``: the timeline above.
    * ``"collective"``: the group's all-gather before all attention, without overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import ALGORITHMS, AttentionCall
from triton_dist.kernels.nvidia.sp_ag_attention.context import SPAttentionContext


@op(
    algorithms=ALGORITHMS,
    call=AttentionCall,
    key_sizes=("M",),
    agree_fn=lambda *args, **kwargs: AttentionCall(*args, **kwargs).agreement,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def sp_ag_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: SPAttentionContext,
    is_causal: bool = True,
    zigzag: bool = True,
    seq_lens: Sequence[int] | None = None,
    scale: float | None = None,
    backend: str | None = None,
    algorithm: str | None = None,
    accepted_key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of q over k and v of all ranks, and its log-sum-exp; tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. All ranks have equal
    shapes.

    Args:
        q: [batch, tokens of this rank, q_heads, head_dim], dtype of the context, contiguous heads.
        k, v: [batch, tokens of this rank, kv_heads, head_dim].
        ctx: context of ``create_sp_ag_attention_context``.
        is_causal: a token attends to itself and earlier tokens.
        zigzag: this rank has the chunks r and 2 W - 1 - r of 2 W chunks of a causal sequence;
            ``False``: part r of W parts. Without ``is_causal``, the order does not matter.
        seq_lens: tokens on each rank of every sequence, for sequences packed into a batch of 1;
            equal on all ranks. Default: one sequence per batch.
        scale: factor of the products of q and k; default: 1 / sqrt(head_dim).
        backend: library: ``"cudnn"`` or ``"flash"`` on GPUs, ``"cpu"`` on CPU ranks (tuned).
        algorithm: ``"copy_engine"`` (default) or ``"collective"`` (tuned).
        accepted_key: reserved for the tuner.

    Returns:
        out, like q, and the log-sum-exp, fp32 [batch, q_heads, tokens of this rank].

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or options (see ``ctx.check``).
    """
    return AttentionCall(
        q, k, v, ctx, is_causal, zigzag, seq_lens, scale, backend, algorithm, accepted_key
    ).run()  # type: ignore[return-value]


def sp_ag_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    ctx: SPAttentionContext,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v of this rank. Not tuned.

    Args:
        grad: gradient of ``out``.
        q, k, v, ctx: arguments of ``sp_ag_attention``.
        out, lse: its results.
        options: its other arguments.
    """
    return AttentionCall(q, k, v, ctx, **options).gradients(grad, out, lse)
