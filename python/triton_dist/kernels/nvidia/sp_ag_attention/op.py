"""AllGather-attention: attention over a sequence of which each rank has a part.

Each rank has its part of the tokens of q, k and v, with all heads. Copy engines push k and v of
every rank to all other ranks while a library computes attention over the rank's own part. Then, for
each other part, a kernel of one block waits for the part, the library attends to the part, and a
small kernel merges the results by their log-sum-exps.

Timeline of one call (W = 3):
    main stream  ─┬─ own part │ wait, part of rank+1, merge │ wait, part of rank+2, merge ─┬─ end
    copy streams  └─ k, v → rank-1, flag │ k, v → rank-2, flag ────────────────────────────┘

Zig-zag order gives every rank equal work on a causal sequence: of 2 W chunks, rank r has the chunks
r and 2 W - 1 - r. Both chunks of a rank attend to the first chunk of each earlier rank. Only the
second chunk of a rank attends to later ranks, to both of their chunks. The attention over the part
of another rank is therefore one call of the library.

The backward gathers k and v again in the same way. A reduce-scatter sums the gradients of k and v.

Algorithms:
    * ``"copy_engine"``: the timeline above.
    * ``"collective"``: all-gather by ``torch.distributed``, then all attention. No overlap.
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
    validated_key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of q over k and v of all ranks, and its log-sum-exp. Tuned over all
    ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. All ranks have equal
    shapes.

    Args:
        q: [batch, tokens of this rank, q_heads, head_dim], dtype of the context. The heads of each
            token must be contiguous.
        k, v: [batch, tokens of this rank, kv_heads, head_dim].
        ctx: context of ``create_sp_ag_attention_context``.
        is_causal: whether a token attends only to itself and earlier tokens.
        zigzag: if true, rank r of W has the chunks r and 2 W - 1 - r of 2 W chunks of a causal
            sequence, else chunk r of W chunks. Without ``is_causal``, the order does not matter.
        seq_lens: for several sequences packed into a batch of 1: the number of tokens of each
            sequence on a rank, equal on all ranks. Default: each row of the batch is a sequence.
        scale: factor of the products of q and k; default: 1 / sqrt(head_dim).
        backend: library: ``"cudnn"`` or ``"flash"`` on GPUs, ``"cpu"`` on CPU ranks (tuned).
        algorithm: ``"copy_engine"`` or ``"collective"`` (tuned; ``"copy_engine"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        The attention, with the shape and dtype of q, and the log-sum-exp, fp32 [batch, q_heads,
        tokens of this rank].

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or options (see ``ctx.check``).
    """
    return AttentionCall(
        q, k, v, ctx, is_causal, zigzag, seq_lens, scale, backend, algorithm, validated_key
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
        out, lse: results of ``sp_ag_attention``.
        options: other arguments of ``sp_ag_attention``.
    """
    return AttentionCall(q, k, v, ctx, **options).gradients(grad, out, lse)
