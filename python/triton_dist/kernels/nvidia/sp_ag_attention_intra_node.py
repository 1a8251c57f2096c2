"""AllGather-attention under the names that scripts of Triton-distributed use.

New programs should call ``sp_ag_attention``, which these functions call.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia.sp_ag_attention import (
    create_sp_ag_attention_context,
    sp_ag_attention,
)


class SPAllGatherAttentionContextIntraNode:
    """Context of ``fused_sp_ag_attn_intra_node``. Creation is collective over the world.

    Args:
        batch_size: number of sequences.
        q_head, kv_head, head_dim: number of heads of q, of heads of k and v, and of elements of a
            head.
        max_seqlen_k: ignored; ``max_q_shard_len * world_size`` is used.
        max_q_shard_len: maximum number of tokens of a sequence on a rank.
        input_dtype: dtype of q, k and v.
        rank, world_size: this rank, and the number of ranks. All ranks must be on one host.
        output_dtype: dtype of ``attn_output_buffer``.
        device: device of ``attn_output_buffer``.
    """

    def __init__(
        self, batch_size: int, q_head: int, kv_head: int, max_seqlen_k: int, max_q_shard_len: int,
        head_dim: int, input_dtype: torch.dtype, output_dtype: torch.dtype, rank: int,
        world_size: int, device: Any,
    ) -> None:  # fmt: skip
        rows = batch_size * max_q_shard_len
        self.ctx = create_sp_ag_attention_context(
            rank, world_size, world_size, rows, kv_head, head_dim, input_dtype
        )
        shape = rows, q_head, head_dim
        self.attn_output_buffer = torch.empty(shape, dtype=output_dtype, device=device)

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        self.ctx.finalize()


create_sp_ag_attention_context_intra_node = SPAllGatherAttentionContextIntraNode


def fused_sp_ag_attn_intra_node(
    ctx: SPAllGatherAttentionContextIntraNode, q_shard: torch.Tensor, k_shard: torch.Tensor,
    v_shard: torch.Tensor, output: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_q_shard_len: int, max_seqlen_k: int, rank: int,
    world_size: int, is_causal: bool = True, enable_zig_zag: bool = True,
) -> None:  # fmt: skip
    """Store the attention over packed sequences in ``output``. Tuned.

    Synchronises with the device, to read the lengths.

    Args:
        q_shard, output: [tokens of this rank, q_head, head_dim].
        k_shard, v_shard: [tokens of this rank, kv_head, head_dim].
        cu_seqlens_q: int32 [sequences + 1], 0 and the ends of the sequences on this rank.
        cu_seqlens_k: int32 [sequences + 1], 0 and the ends over all ranks. Must be
            ``world_size`` times ``cu_seqlens_q``, because q and k must have equal lengths.
        is_causal, enable_zig_zag: see ``sp_ag_attention``.
        max_q_shard_len, max_seqlen_k, rank, world_size: ignored.

    Raises:
        InvalidArgument: q and k have different lengths, which ``sp_ag_attention`` does not support.
            For other causes, see ``sp_ag_attention``.
    """
    ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    expected = [end * ctx.ctx.num_ranks for end in ends]
    if k_ends != expected:
        function = "fused_sp_ag_attn_intra_node"
        reason = f"{expected}, world_size * cu_seqlens_q"
        raise InvalidArgument(function, "cu_seqlens_k", k_ends, reason)
    lengths = [end - begin for begin, end in pairwise(ends)]
    out, _ = sp_ag_attention(
        q_shard[None], k_shard[None], v_shard[None], ctx.ctx, is_causal, enable_zig_zag, lengths
    )
    output.copy_(out[0])
