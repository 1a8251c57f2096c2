"""Ulysses exchanges fused with the projections before and after attention, on one host.

``ulysses_gemm_pre_attn`` projects this rank's tokens to q, k and v, and sends them to the ranks of
their heads. ``ulysses_post_attn_gemm`` sends the output of the attention to the ranks of its
tokens, and multiplies it by the output projection. ``ulysses/op.py`` describes the exchanges.

Timeline of ``"fused"`` (W = 2):
    pre_attn:  tiles of the peer's heads → peer │ tiles of own heads │ flag, wait, copy to results
    post_attn: copy engine: chunk 0 → peer │ chunk 1 │ …
               GEMM: own part of K │ wait for rows of chunk 0 │ the peer's part of K │ next tile …

Algorithms:
    * ``"fused"``: the timelines above.
    * ``"serial"``: a library's GEMM, and the exchange by ``"push"`` of the Ulysses op.
    * ``"collective"``: a library's GEMM, and NCCL's all-to-all (gloo on CPU ranks).

Design:
    * The kernel that sends tiles waits for no peer, so it needs no co-resident programs. Its end
      orders all tiles before the flags, so a call has one flag per peer.
    * The results are new tensors, because autograd keeps them. Tiles for other ranks therefore go
      through slots, and are copied when all have arrived.
    * A tile of the output projection needs blocks of all ranks, which are parts of K. It multiplies
      this rank's block while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.ulysses import UlyssesContext
from triton_dist.kernels.nvidia.ulysses_gemm.algorithms import (
    GEMM_PRE_ATTN,
    POST_ATTN_GEMM,
    gemm_pre_attn_call,
    post_attn_gemm_call,
)


@op(
    algorithms=GEMM_PRE_ATTN,
    call=gemm_pre_attn_call,
    key_sizes=("M",),
    agree_fn=lambda *args, **kwargs: gemm_pre_attn_call(*args, **kwargs).agreement,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ulysses_gemm_pre_attn(
    x: torch.Tensor,
    B: torch.Tensor,
    ctx: UlyssesContext,
    bias: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    gemm_config: triton.Config | None = None,
    persistent: bool = True,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Project tokens to q, k and v; return them for the whole sequence and this rank's heads.

    Tuned over all ranks. The rules for calls are in the docstring of
    ``triton_dist.kernels.nvidia``. The result equals ``ulysses_pre_attn`` of the columns of
    ``x @ B + bias``.

    Args:
        x: [batch, tokens of this rank, hidden], dtype of the context.
        B: [hidden, q_heads * head_dim + kv_heads * (head_dim + v_head_dim)], any strides, dtype of
            the context: columns of all heads of q, then of k, then of v. All ranks pass the same.
        ctx: context of ``create_ulysses_context``.
        bias: [columns of B], contiguous, dtype of the context.
        seq_lens: see ``ulysses_pre_attn``.
        gemm_config, persistent: tile sizes of ``"fused"``, and whether it reads by tensor
            descriptors (tuned).
        num_ctas, block_bytes, num_chunks: tunables of the exchange after a separate GEMM; see
            ``ulysses_pre_attn`` (tuned).
        algorithm: ``"fused"``, ``"serial"`` or ``"collective"`` (tuned; ``"fused"`` if untuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        q, k and v: new tensors [batch, tokens of all ranks, heads of this rank, dim].

    Raises:
        InvalidArgument: an argument does not fit the context or the algorithm.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or ``seq_lens`` (see ``ctx.check``).
    """
    return gemm_pre_attn_call(
        x, B, ctx, bias, seq_lens, gemm_config, persistent, num_ctas, block_bytes, num_chunks,
        algorithm, validated_key,
    ).run()  # type: ignore[return-value]  # fmt: skip


@op(
    algorithms=POST_ATTN_GEMM,
    call=post_attn_gemm_call,
    key_sizes=("M",),
    agree_fn=lambda *args, **kwargs: post_attn_gemm_call(*args, **kwargs).agreement,
    version="1",  # change when the shipped results (records/) must no longer be used
)
def ulysses_post_attn_gemm(
    o: torch.Tensor,
    B: torch.Tensor,
    ctx: UlyssesContext,
    bias: torch.Tensor | None = None,
    seq_lens: Sequence[int] | None = None,
    gemm_config: triton.Config | None = None,
    persistent: bool = True,
    num_ctas: int | None = None,
    block_bytes: int | None = None,
    num_chunks: int | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> torch.Tensor:
    """Return ``ulysses_post_attn`` of o, multiplied by B. Tuned over all ranks.

    The product is accumulated in fp32, in an order that depends on the rank.

    Args:
        o: [batch, tokens of all ranks, q_heads / W, head_dim or v_head_dim], contiguous, dtype of
            the context.
        B: [q_heads * dimension of o, features], any strides, dtype of the context.
        ctx: context of ``create_ulysses_context``.
        bias: [features], contiguous, dtype of the context.
        seq_lens: see ``ulysses_post_attn``.
        gemm_config, persistent, num_ctas, block_bytes, algorithm, validated_key: see
            ``ulysses_gemm_pre_attn``.
        num_chunks: number of chunks of each block; ``"fused"`` waits for chunks (tuned).

    Returns:
        New tensor [batch, tokens of this rank, features].

    Raises:
        InvalidArgument, ContextFinalized, RankDisagreement: see ``ulysses_gemm_pre_attn``.
    """
    return post_attn_gemm_call(
        o, B, ctx, bias, seq_lens, gemm_config, persistent, num_ctas, block_bytes, num_chunks,
        algorithm, validated_key,
    ).run()  # fmt: skip
