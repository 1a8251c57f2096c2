"""Context of AllGather-attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from triton_dist.kernels.common.collective.pushed import PushedShards
from triton_dist.kernels.common.context import (
    Check,
    OpContext,
    agree_to_create,
    dtype_checks,
)
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, process_group_of


class SPAttentionContext(OpContext[PushedShards]):
    """Symmetric memory of ``sp_ag_attention``, which receives k and v. A context manager."""

    def __init__(
        self,
        max_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__("sp_ag_attention", group)
        self.max_tokens, self.kv_heads, self.head_dim = max_tokens, kv_heads, head_dim
        self.dtype = dtype
        nbytes = 2 * max_tokens * kv_heads * head_dim * dtype.itemsize
        value = "digest of the shapes and options of a call of sp_ag_attention"
        with self.allocating() as add:
            self.buffer = add(
                PushedShards(
                    nbytes if self.num_ranks > 1 else 16, group, "sp_ag_attention",
                    Disagreements(value, group),
                )
            )  # fmt: skip


def create_sp_ag_attention_context(
    rank: int,
    world_size: int,
    local_world_size: int,
    max_tokens: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    group: Group = None,
) -> SPAttentionContext:
    """Create the context of ``sp_ag_attention``. Collective over ``group``.

    In the memory of each rank, the context uses twice the bytes of the k and v of all ranks.

    Args:
        rank, world_size, local_world_size: this rank, the number of ranks of the group, and the
            number of ranks on this host.
        max_tokens: maximum, over all calls, of the batch size times the tokens of a rank.
        kv_heads: number of heads of k and v.
        head_dim: number of elements of a head, a multiple of 8.
        dtype: dtype of q, k and v: fp16 or bf16; on CPU ranks also fp32.
        group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    group = process_group_of(group)

    def checks() -> Iterator[Check]:
        yield "head_dim", head_dim, head_dim % 8 == 0, "a multiple of 8"
        yield from dtype_checks("dtype", dtype)
        on_cpu = current_device().torch_device.type == "cpu"
        fits = on_cpu or dtype is not torch.float32
        yield "dtype", dtype, fits, "torch.float16 or torch.bfloat16, which libraries support"

    agree_to_create(
        "create_sp_ag_attention_context", "an AllGather-attention", group, rank,
        {"world_size": world_size, "local_world_size": local_world_size},
        {"max_tokens": max_tokens, "kv_heads": kv_heads, "head_dim": head_dim}, checks(),
        dtype=dtype,
    )  # fmt: skip
    return SPAttentionContext(max_tokens, kv_heads, head_dim, dtype, group)
