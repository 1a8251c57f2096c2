"""Decode attention over ranks: each rank holds a part of the tokens of every sequence.

Every rank computes attention of the new tokens over its own keys. The partial outputs are merged by
their log-sum-exp (LSE).

Timeline of the algorithm ``"packets"``, one launch on every rank:
    attention over equal shares of the keys │ barrier of the grid │ combine → peers │ merge

Design:
    * Lengths are read on the device, so a captured graph serves any lengths. The keys of all
      sequences are divided evenly over the programs, however different the lengths are.
    * A rank without keys sends an LSE of minus infinity. Every call waits for every peer.
    * Ranks exchange outputs in the dtype of q and LSEs in fp32, and add in the order of ranks.

Algorithms:
    * ``"packets"``: the timeline above.
    * ``"all_to_all"``: our attention, then NCCL's all-to-all of packed outputs and LSEs
      (all-gather if the output is replicated), then a kernel that merges them.
    * ``"reduce_scatter"``: our attention, then NCCL's all-gather of LSEs and reduce-scatter
      (all-reduce) of weighted outputs.
    * ``"library"``, ``"library_reduce_scatter"``: PyTorch's flash attention with these exchanges.
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
    algorithm: str | None = None,
    accepted_key: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention of new tokens over the keys of all ranks; tuned over all ranks.

    The rules for calls are in the docstring of ``triton_dist.kernels.nvidia``. The cache already
    contains the new tokens, which are the last tokens of a sequence. A new token does not attend to
    later ones. The host does not read ``kv_lens`` or ``block_table``.

    Args:
        q: [batch, new tokens, heads, head_dim] or [batch, heads, head_dim], equal on all ranks; or
            this rank's heads, if the context was created with ``shard_queries``.
        k_cache: this rank's keys, [batch, tokens, KV heads, head_dim], or with a ``block_table``
            [pages, page size, KV heads, head_dim]: dtype of q or ``float8_e4m3fn``.
        v_cache: this rank's values, with ``v_head_dim`` elements. ``None``: the first
            ``v_head_dim`` elements of each key are its value, as in multi-head latent attention.
        kv_lens: int32 [ranks, batch], numbers of keys on each rank, also 0. The keys of a sequence
            are in the order of ranks. With ``interleave``: int32 [batch], lengths of the sequences.
        ctx: context of ``create_sp_decode_context``.
        block_table: int32 [batch, pages of a sequence], this rank's pages.
        scale: factor of the scores; default: ``head_dim ** -0.5``.
        soft_cap: bound the scores by ``soft_cap * tanh(scores / soft_cap)``; 0: no bound.
        window: a token attends to itself and to the ``window - 1`` tokens before it.
        sinks: fp32 [heads], scores without a value, which only enlarge the denominator.
        k_scale, v_scale: fp32 [1] or [KV heads], factors of keys and values.
        interleave: the ranks hold this number of consecutive tokens in turn, beginning with rank 0.
        shard_output: return only this rank's heads, ``rank * heads / ranks`` on.
        lse_base: base of the LSE: ``"e"`` or ``"2"``.
        max_kv_len: bound of the keys of a sequence on a rank, for which the op is tuned, equal on
            all ranks; default: the room in the cache. It does not limit the keys.
        ctas_per_sm: programs per multiprocessor; all of them share the keys equally (tuned).
        block_n, num_stages, num_warps: keys of a block, blocks in flight, and warps (tuned).
        algorithm: see the module docstring (tuned).
        accepted_key: reserved for the tuner.

    Returns:
        The output, in the shape of q with ``v_head_dim`` elements, and the LSE, fp32 without the
        last dimension. The LSE includes the sinks. For a row without keys the output is 0 and the
        LSE minus infinity.

    Raises:
        InvalidArgument: an argument does not fit the context.
        ContextFinalized: ``ctx`` was finalized.
        RankDisagreement: ranks pass different shapes or options (``SpDecodeContext.check``).
    """
    return Call(
        q, k_cache, v_cache, kv_lens, ctx, block_table, scale, soft_cap, window, sinks, k_scale,
        v_scale, interleave, shard_output, lse_base, max_kv_len, ctas_per_sm, block_n, num_stages,
        num_warps, algorithm, accepted_key,
    ).run()  # type: ignore[return-value]  # fmt: skip
