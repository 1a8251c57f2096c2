"""Attention over a sequence whose tokens are distributed over a 2-D mesh of ranks.

Ranks of one mesh dimension exchange tokens for heads (Ulysses). Ranks of the other dimension gather
k and v.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

from triton_dist.errors import InvalidArgument
from triton_dist.kernels.nvidia import create_sp_ag_attention_context, create_ulysses_context
from triton_dist.layers.nvidia.sequence_parallel import ag_attention, post_attn, pre_attn
from triton_dist.runtime.ranks import group_for


class SP_Attn(torch.nn.Module):
    """Attention of q, k and v whose tokens are distributed over ranks. Differentiable; collective.

    The Ulysses exchange needs at least one head of q per rank of its group. Gathering k and v
    (``sp_ag_attention``) works with any number of heads but transfers more data.

    Args:
        mesh: 2-D mesh of G x U ranks. Groups of G ranks (first dimension) gather k and v; groups of
            U ranks (second dimension) exchange tokens for heads. G = 1 omits the gather, U = 1 the
            exchange.
        max_tokens: largest number of tokens per rank in any call, counted over the whole batch.
        q_heads: heads of q, a multiple of U and of ``kv_heads``.
        kv_heads: heads of k and v, a multiple or a divisor of U.
        head_dim: elements of a head, a multiple of 8.
        dtype: fp16 or bf16; on CPU ranks also fp32.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ulysses_context`` and
            ``create_sp_ag_attention_context``.
    """

    def __init__(
        self, mesh: DeviceMesh, max_tokens: int, q_heads: int, kv_heads: int, head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        super().__init__()
        if mesh.ndim != 2:
            raise InvalidArgument("SP_Attn", "mesh.ndim", mesh.ndim, "a mesh of 2 dimensions")
        gather_group, exchange_group = mesh.get_group(0), mesh.get_group(1)
        gather, exchange = group_for(gather_group), group_for(exchange_group)
        self.gather_rank, self.gather_size = gather.rank, gather.size
        self.exchange_rank, self.exchange_size = exchange.rank, exchange.size
        size = exchange.size
        self.exchange_ctx = create_ulysses_context(
            exchange.rank, size, size, size * max_tokens, q_heads, kv_heads, head_dim, dtype,
            group=exchange_group,
        )  # fmt: skip
        local_kv_heads = max(1, kv_heads // size)
        self.gather_ctx = create_sp_ag_attention_context(
            gather.rank, gather.size, gather.size, size * max_tokens, local_kv_heads, head_dim,
            dtype, group=gather_group,
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = True
    ) -> torch.Tensor:
        """Return attention [batch, tokens of this rank, q_heads, head_dim].

        Args:
            q, k, v: [batch, tokens of this rank, heads, head_dim], equal shapes on all ranks. The
                tokens must be at the sequence positions that ``tokens`` returns.
            is_causal: a token attends only to itself and earlier tokens.
        """
        q, k, v = pre_attn(q, k, v, self.exchange_ctx)
        return post_attn(
            ag_attention(q, k, v, self.gather_ctx, is_causal=is_causal), self.exchange_ctx
        )

    def tokens(self, length: int) -> torch.Tensor:
        """Return the positions of this rank's tokens in a sequence of ``length`` tokens.

        The sequence is cut into 2 G chunks. The U ranks with coordinate g in the first mesh
        dimension share chunks g and 2 G - 1 - g equally. This balances causal attention.

        Raises:
            InvalidArgument: ``length`` is not a multiple of 2 G and of G U.
        """
        size, rank = self.gather_size, self.gather_rank
        if length % (2 * size) or length % (size * self.exchange_size):
            expected = f"a multiple of {2 * size} and of {size * self.exchange_size}"
            raise InvalidArgument("SP_Attn.tokens", "length", length, expected)
        chunks = torch.arange(length, device=self.gather_ctx.device.torch_device).chunk(2 * size)
        if size == 1:
            own = torch.cat(chunks)
        else:
            own = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        return own.chunk(self.exchange_size)[self.exchange_rank]

    def finalize(self) -> None:
        """Free the contexts; idempotent. Collective."""
        self.exchange_ctx.finalize()
        self.gather_ctx.finalize()
