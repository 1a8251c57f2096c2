"""Ulysses sequence parallelism on one host, which shards by heads during attention.

Outside attention, each of W ranks has a part of the sequence with all heads. ``ulysses_pre_attn``
gives each rank the whole sequence for its part of the heads of q, k and v, so that each rank can
compute attention for its heads. ``ulysses_post_attn`` converts the output of the attention back, to
a part of the sequence with all heads. Each op is the backward of the other op. If there are fewer
KV heads than ranks, W / kv_heads ranks receive the same head. ``ulysses_post_attn`` adds the
gradients of these ranks.

Timeline of a call, one launch on every rank, in chunks of rows:
    chunk 0 → peers, flag │ chunk 1 → peers, flag │ …                │
                          │ wait, copy chunk 0 out │ chunk 1 │ … │

Design:
    * A block is the part of a tensor that one rank sends to another rank. Blocks are contiguous in
      the receive memory, so sources write long rows.
    * Results are new tensors, because autograd keeps them. The copy from the receive memory to the
      results overlaps with the transfer of the next chunk.
    * The parts of the sequence may have different lengths. All ranks pass the lengths of all ranks,
      so the host reads no device memory. The flags contain a digest of the lengths, so different
      arguments are detected.

Algorithms:
    * ``"push"``: the timeline above.
    * ``"collective"``: all-to-all by ``torch.distributed`` (NCCL, or gloo on CPU ranks) between two
      permutations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.ulysses.algorithms import (
    POST_ATTN,
    PRE_ATTN,
    post_attn_call,
    pre_attn_call,
)
from triton_dist.kernels.nvidia.ulysses.context import UlyssesContext


@op(
    algorithms=PRE_ATTN,
    call=pre_attn_call,
    key_sizes=("M",),
    agree_fn=lambda *args, **kwargs: pre_attn_call(*args, **kwargs).agreement,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ulysses_pre_attn(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    ctx: UlyssesContext,
    seq_lens: Sequence[int] | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Return q, k and v of the whole sequence for this rank's heads. Tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. Rank r of W receives
    ``q_heads / W`` heads of q from head ``r * q_heads / W`` on, and the KV heads that they use.

    Args:
        q: [batch, tokens of this rank, q_heads, head_dim], dtype of the context. The heads of each
            token must be contiguous. All tokens must have the same distance, which may be larger
            than a token, as in a view of a packed QKV projection.
        k, v: [batch, tokens of this rank, kv_heads, head_dim or v_head_dim], or ``None``. If k is
            ``None``, v must be ``None``.
        ctx: context of ``create_ulysses_context``.
        seq_lens: number of tokens of each rank, per batch, equal on all ranks; default: every rank
            has the number of tokens of this rank. The first call with new lengths must not be in a
            graph capture.
        num_ctas, block_bytes, num_chunks: number of workers (programs that share a chunk), bytes
            that a program copies at once, and number of chunks of each block (tuned).
        algorithm: ``"push"`` or ``"collective"`` (tuned; ``"push"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        New tensors [batch, tokens of all ranks, heads of this rank, dim], one for each of q, k and
        v that is not ``None``.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or ``seq_lens`` (see ``ctx.check``).
    """
    return pre_attn_call(
        q, k, v, ctx, seq_lens, num_ctas, block_bytes, num_chunks, algorithm, validated_key
    ).run()  # type: ignore[return-value]


@op(
    algorithms=POST_ATTN,
    call=post_attn_call,
    key_sizes=("M",),
    agree_fn=lambda *args, **kwargs: post_attn_call(*args, **kwargs).agreement,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ulysses_post_attn(
    o: torch.Tensor,
    ctx: UlyssesContext,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Return this rank's part of the sequence with all heads. Tuned over all ranks.

    Args:
        o: [batch, tokens of all ranks, q_heads / W, head_dim or v_head_dim], contiguous, dtype of
            the context: the output of the attention, or the gradient of q.
        ctx: context of ``create_ulysses_context``.
        k, v: gradients of k and v, [batch, tokens of all ranks, KV heads of this rank, dim], for
            the backward of ``ulysses_pre_attn``. Gradients of a KV head that several ranks use are
            added in fp32 and rounded once.
        seq_lens, num_ctas, block_bytes, num_chunks, algorithm, validated_key: see
            ``ulysses_pre_attn``. By default, all ranks have equally many tokens.

    Returns:
        New tensors [batch, tokens of this rank, all heads, dim], one for each of o, k and v that is
        not ``None``.

    Raises:
        InvalidArgument, ContextFinalized, RankDisagreement: see ``ulysses_pre_attn``.
    """
    return post_attn_call(
        o, ctx, k, v, seq_lens, num_ctas, block_bytes, num_chunks, algorithm, validated_key
    ).run()  # type: ignore[return-value]
