"""Decode attention over ranks under the name of Triton-distributed's layer."""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import SpDecodeContext, create_sp_decode_context, sp_decode_attn


class SpGQAFlashDecodeAttention(torch.nn.Module):
    """Attention of one new token per sequence over the paged KV caches of all ranks. Tuned.

    The first call allocates memory. So does a call with another dtype, or with more sequences than
    the memory allows. New programs call ``sp_decode_attn``.

    Args:
        rank, num_ranks: this rank in the world, and the number of ranks.
        node: ignored.
        num_nodes: number of hosts, which must be 1.
        num_q_heads, num_kv_heads: query heads and KV heads.
        q_head_dim, v_head_dim: elements of a query and of a value.
        page_size: number of tokens in a page of the caches.
        scale: factor of the scores.
        soft_cap: bound the scores by ``soft_cap * tanh(scores / soft_cap)``; 0: no bound.
        max_allowed_batch: number of sequences for which the first call allocates memory.
        thrink_buffer_threshold, stages: ignored.
    """

    def __init__(
        self, rank: int, node: int, num_ranks: int, num_nodes: int, num_q_heads: int,
        num_kv_heads: int, q_head_dim: int, v_head_dim: int, page_size: int = 1, scale: float = 1,
        soft_cap: float = 0, max_allowed_batch: int = 1, thrink_buffer_threshold: int = 500,
        stages: int = 20,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_nodes != 1:
            raise InvalidArgument("SpGQAFlashDecodeAttention", "num_nodes", num_nodes, "1")
        self.rank, self.num_ranks, self.page_size = rank, num_ranks, page_size
        self.num_q_heads, self.num_kv_heads = num_q_heads, num_kv_heads
        self.q_head_dim, self.v_head_dim = q_head_dim, v_head_dim
        self.scale, self.soft_cap = float(scale), float(soft_cap)
        self.max_allowed_batch = max_allowed_batch
        self.ctx: SpDecodeContext | None = None

    def forward(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        global_kv_lens: torch.Tensor, block_table: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Return the attention output, [batch, query heads, v_head_dim], on all ranks. Collective.

        Args:
            q: [batch, query heads, q_head_dim], equal on all ranks.
            k_cache, v_cache: this rank's pages, [pages, page_size, KV heads, head dimension].
            global_kv_lens: int32 [ranks, batch], number of keys of each sequence on each rank.
            block_table: int32 [batch, pages], indices of the pages of each sequence in this rank's
                caches.
        """
        for cache, name in ((k_cache, "k_cache"), (v_cache, "v_cache")):
            found, expected = tuple(cache.shape[1:3]), (self.page_size, self.num_kv_heads)
            if found != expected:
                function = "SpGQAFlashDecodeAttention"
                raise InvalidArgument(function, f"{name}.shape[1:3]", found, f"{expected}")
        if self.ctx is None or len(q) > self.ctx.max_batch or q.dtype != self.ctx.dtype:
            self.finalize()
            self.ctx = create_sp_decode_context(
                self.rank, self.num_ranks, self.num_ranks, max(len(q), self.max_allowed_batch),
                self.num_q_heads, self.q_head_dim, q.dtype, v_head_dim=self.v_head_dim,
            )  # fmt: skip
        out, _ = sp_decode_attn(
            q, k_cache, v_cache, global_kv_lens, self.ctx, block_table, self.scale, self.soft_cap
        )
        return out

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        if self.ctx is not None:
            self.ctx.finalize()
            self.ctx = None
