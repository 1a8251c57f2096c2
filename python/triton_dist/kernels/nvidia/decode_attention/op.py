"""Decode attention over ranks, where each rank holds a part of the tokens of every sequence.

Every rank computes the attention of the new tokens over its own keys. The partial outputs are
merged with weights computed from their log-sum-exp (LSE).

Timeline of the algorithm ``"packets"``, one launch on every rank:
    attention over equal shares of the keys │ barrier of the grid │ combine → peers │ merge

Design:
    * Kernels read the lengths on the device, so a captured graph can be replayed for other lengths.
      The keys of all sequences are divided evenly over the programs, however different the lengths
      are.
    * A rank without keys sends an LSE of minus infinity. Every call waits for every peer.
    * Ranks exchange outputs in the dtype of q and LSEs in fp32. They add in the order of ranks.

Algorithms:
    * ``"packets"``: the timeline above.
    * ``"all_to_all"``: attention by a kernel of this package, then NCCL's all-to-all of packed
      outputs and LSEs (all-gather if the output is replicated), then a kernel that merges them.
    * ``"reduce_scatter"``: attention by a kernel of this package, then NCCL's all-gather of LSEs
      and reduce-scatter of weighted outputs (all-reduce if the output is replicated).
    * ``"library"``, ``"library_reduce_scatter"``: attention by a library (``backends.py``), with
      the exchange of ``"all_to_all"`` or ``"reduce_scatter"``.
"""

from __future__ import annotations

from typing import Any

import torch

from triton_dist.kernels.common.op import op
from triton_dist.kernels.nvidia.decode_attention.algorithms import ALGORITHMS, Call
from triton_dist.kernels.nvidia.decode_attention.context import SpDecodeContext


@op(
    algorithms=ALGORITHMS,
    call=Call,
    key_sizes=("batch", "max_kv_len"),
    version="1",  # change when the shipped results (records/) must no longer be used
)
def sp_decode_attn(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    kv_lens: torch.Tensor,
    ctx: SpDecodeContext,
    block_table: torch.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    interleave: int | None = None,
    shard_output: bool = False,
    lse_base: str = "e",
    max_kv_len: int | None = None,
    ctas_per_sm: int | None = None,
    block_n: int | None = None,
    num_stages: int | None = None,
    num_warps: int | None = None,
    backend: str | None = None,
    algorithm: str | None = None,
    validated_key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of new tokens over the keys of all ranks. Tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. The cache already
    contains the new tokens, which are the last tokens of each sequence. A new token does not attend
    to later tokens. The host does not read ``kv_lens`` or ``block_table``.

    Args:
        q: [batch, new tokens, heads, head_dim] or [batch, heads, head_dim], equal on all ranks. If
            the context was created with ``shard_queries``, q may also have only this rank's heads.
        k_cache: this rank's keys, [batch, tokens, KV heads, head_dim], or with a ``block_table``
            [pages, page size, KV heads, head_dim]. Its dtype is the dtype of q or
            ``float8_e4m3fn``.
        v_cache: this rank's values, in the shape of ``k_cache`` with ``v_head_dim`` elements. If
            ``None``, the first ``v_head_dim`` elements of each key are its value, as in multi-head
            latent attention.
        kv_lens: without ``interleave``: int32 [ranks, batch], the number of keys on each rank, 0 or
            more. The keys of a sequence are in the order of ranks. With ``interleave``: int32
            [batch], the lengths of the sequences.
        ctx: context of ``create_sp_decode_context``.
        block_table: int32 [batch, pages of a sequence], this rank's pages.
        scale: factor of the scores; default: ``head_dim ** -0.5``.
        soft_cap: if not 0, scores are replaced by ``soft_cap * tanh(scores / soft_cap)``.
        window: a token attends to itself and to the ``window - 1`` tokens before it.
        sinks: fp32 [heads], further scores, which only increase the softmax denominator.
        k_scale, v_scale: fp32 [1] or [KV heads], factors of keys and values.
        interleave: the ranks hold this number of consecutive tokens in turn, beginning with rank 0.
        shard_output: whether to return only this rank's heads: ``heads / ranks`` heads from
            ``rank * heads / ranks`` on.
        lse_base: base of the LSE: ``"e"`` or ``"2"``.
        max_kv_len: number of keys of a sequence on a rank for which the op is tuned, equal on all
            ranks; default: the capacity of the cache. Sequences may have more keys.
        ctas_per_sm: number of programs per SM (tuned).
        block_n, num_stages, num_warps: keys per block, number of blocks loaded in advance, and
            number of warps (tuned).
        backend: library of the algorithms ``"library…"``: ``"torch"`` (default),
            ``"flash_attn_3"`` or ``"flashinfer"`` (tuned).
        algorithm: see the module docstring (tuned).
        validated_key: reserved for the tuner, which passes the key that it has computed.

    Returns:
        The output and the LSE. The output has q's shape, with the number of returned heads, and
        ``v_head_dim`` as last dimension. The LSE is fp32 in this shape without the last dimension,
        and includes the sinks. Without keys, the output is 0 and the LSE is minus infinity.

    Raises:
        InvalidArgument: an argument does not fit the context.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or options (``SpDecodeContext.check``).
    """
    return Call(
        q, k_cache, v_cache, kv_lens, ctx, block_table, scale, soft_cap, window, sinks, k_scale,
        v_scale, interleave, shard_output, lse_base, max_kv_len, ctas_per_sm, block_n, num_stages,
        num_warps, backend, algorithm, validated_key,
    ).run()  # type: ignore[return-value]  # fmt: skip
