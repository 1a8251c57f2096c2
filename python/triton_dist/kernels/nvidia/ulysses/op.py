"""Ulysses sequence parallelism on one host: exchange the sequence for the heads, and back.

Each of W ranks has a part of the sequence with all heads. ``ulysses_pre_attn`` gives each rank the
whole sequence for its part of the heads of q, k and v, so that each rank computes attention for
its heads. ``ulysses_post_attn`` returns the output of the attention to sequence parts. Each is the
other's backward. If there are fewer KV heads than ranks, W / kv_heads ranks receive the same head,
and the way back adds their gradients.

Timeline of a call, one launch on every rank, in chunks of rows:
    chunk 0 → peers, flag │ chunk 1 → peers, flag │ …                │
                          │ wait, copy chunk 0 out │ chunk 1 │ … │

Design:
    * Blocks are contiguous in the receive memory, so sources write long rows and copy engines send
      a block with one copy.
    * Results are new tensors, because autograd keeps them. The copy out of the receive memory
      overlaps with the transfer of the next chunk.
    * Parts may have different lengths. All ranks pass the lengths of all ranks, so the host reads
      no device memory; flags compare them.

Algorithms:
    * ``"push"``: the timeline above.
    * ``"copy_engine"``: copy engines push chunks; a kernel copies out what arrives.
    * ``"collective"``: the group's all-to-all (NCCL; gloo on CPU ranks) between two permutations.
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
    accepted_key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Return q, k and v of the whole sequence for this rank's heads; tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. Rank r of W receives
    the q heads ``r * q_heads / W`` and following, and the KV heads that they use.

    Args:
        q: [batch, tokens of this rank, q_heads, head_dim], dtype of the context. Rows of tokens may
            have any common distance, as views of a packed QKV projection have.
        k, v: [batch, tokens of this rank, kv_heads, head_dim or v_head_dim], or ``None``. v may be
            ``None`` if k is.
        ctx: context of ``create_ulysses_context``.
        seq_lens: tokens of each rank, per batch, equal on all ranks; default: the tokens of this
            rank on all ranks. The first call for some lengths must not be in a graph capture.
        num_ctas, block_bytes, num_chunks: programs of a launch, bytes that a program moves per
            step, and chunks of each block (tuned).
        algorithm: ``"push"`` (default), ``"copy_engine"`` or ``"collective"`` (tuned).
        accepted_key: reserved for the tuner.

    Returns:
        New tensors [batch, tokens of all ranks, heads of this rank, dim], one for each of q, k and
        v that is not ``None``.

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or ``seq_lens`` (see ``ctx.check``).
    """
    return pre_attn_call(
        q, k, v, ctx, seq_lens, num_ctas, block_bytes, num_chunks, algorithm, accepted_key
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
    accepted_key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Return this rank's part of the sequence with all heads; tuned over all ranks.

    Args:
        o: [batch, tokens of all ranks, q_heads / W, head_dim or v_head_dim], contiguous, dtype of
            the context: output of the attention, or gradient of q.
        ctx: context of ``create_ulysses_context``.
        k, v: gradients of k and v, [batch, tokens of all ranks, KV heads of this rank, dim], for
            the backward of ``ulysses_pre_attn``. Gradients of a KV head that several ranks use are
            added in fp32 and rounded once.
        seq_lens, num_ctas, block_bytes, num_chunks, algorithm, accepted_key: see
            ``ulysses_pre_attn``. The tokens of ranks are equal by default.

    Returns:
        New tensors [batch, tokens of this rank, all heads, dim], one for each of o, k and v that is
        not ``None``.

    Raises:
        InvalidArgument, ContextFinalized, RankDisagreement: see ``ulysses_pre_attn``.
    """
    return post_attn_call(
        o, ctx, k, v, seq_lens, num_ctas, block_bytes, num_chunks, algorithm, accepted_key
    ).run()  # type: ignore[return-value]
