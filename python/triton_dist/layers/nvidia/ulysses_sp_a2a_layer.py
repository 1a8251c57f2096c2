"""The Ulysses exchange before attention, under the name of Triton-distributed's layer.

Before the exchange, a rank has all heads of its tokens; after it, all tokens of its heads. New
programs call ``ulysses_pre_attn``, which this layer wraps.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import create_ulysses_context, ulysses_pre_attn
from triton_dist.runtime.ranks import group_for


class UlyssesSPAllToAllLayer(torch.nn.Module):
    """Exchange tokens for heads of q, k and v between ranks. Tuned. Creation is collective.

    Args:
        sp_group: process group; ``None``: the world.
        bs: largest batch size.
        max_seq: largest length of a sequence, over all ranks.
        q_nheads, kv_nheads: number of heads of q, and of k and v, over all ranks.
        k_head_dim: elements of a head of q or k.
        v_head_dim: elements of a head of v.
        group_size: ignored; computed as ``q_nheads / kv_nheads``.
        dtype: fp16, bf16 or fp32.
        local_world_size: number of ranks on this host; must equal the size of the group.
        num_sms: ignored; tuned.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ulysses_context``.
    """

    def __init__(
        self, sp_group: dist.ProcessGroup | None, bs: int, max_seq: int, q_nheads: int,
        kv_nheads: int, k_head_dim: int, v_head_dim: int, group_size: int,
        dtype: torch.dtype = torch.bfloat16, local_world_size: int = 8, num_sms: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks = group_for(sp_group)
        self.ctx = create_ulysses_context(
            ranks.rank, ranks.size, local_world_size, bs * max_seq, q_nheads, kv_nheads,
            k_head_dim, dtype, v_head_dim=v_head_dim, group=sp_group,
        )  # fmt: skip

    def pre_attn_qkv_pack_a2a(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, skip_q_a2a: bool = False,
        return_comm_buf: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return q, k and v of the whole sequence for this rank's heads, in new memory.

        Args:
            q, k, v: [batch, tokens of this rank, heads, head dimension].
            skip_q_a2a: return ``None`` instead of q. q is sent nevertheless.
            return_comm_buf: ignored.
        """
        q, k, v = ulysses_pre_attn(q, k, v, self.ctx)
        return None if skip_q_a2a else q, k, v

    def get_comm_nbytes(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, skip_q_a2a: bool = False
    ) -> tuple[int, int, int, int]:
        """Return the bytes that a rank sends to other hosts and within its host, listed twice.

        Triton-distributed returns numbers without and with an optimisation; here they are equal.
        """
        size = self.ctx.num_ranks
        rows = q.shape[0] * q.shape[1] * q.element_size()
        width = sum(self.ctx.widths[1 if skip_q_a2a else 0 :])
        within = rows * width * (size - 1)
        return 0, within, 0, within

    def finalize(self) -> None:
        """Free the memory; idempotent. Collective."""
        self.ctx.finalize()
