"""Unfused references that ops are checked against and measured beside."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem


def all_gather_rows(
    shard: torch.Tensor, group: dist.ProcessGroup | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The shards [rows, K] of all ranks on top of one another, [world size * rows, K], by the
    vendor's collective (NCCL, gloo)."""
    if out is None:
        out = shard.new_empty((shard.shape[0] * dist.get_world_size(group), *shard.shape[1:]))
    # torch 2.13 gave the collective a new name and deprecates the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, shard, group=group)
    return out


def all_gather_matmul(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """``all_gather(A) @ B``: collective, then product."""
    return torch.matmul(all_gather_rows(A, group), B)


def has_async_tp(group: dist.ProcessGroup | None = None) -> bool:
    """Whether torch's overlapped all-gather and product can run over ``group``."""
    return (
        torch.cuda.is_available()
        and dist.get_world_size(group) > 1
        and hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")
    )


def async_tp_matmul(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """``all_gather(A) @ B`` by torch's async tensor parallelism; GPUs only.

    A: [M_per_rank, K], contiguous, B: [K, N_per_rank]. Its first call in a group, and one with a
    larger A than any before, are collective and allocate: they cannot be captured.
    """
    members = group if group is not None else dist.group.WORLD
    assert members is not None
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        symm_mem.enable_symm_mem_for_group(members.group_name)  # needless, and deprecated, since
    _, (C,) = torch.ops.symm_mem.fused_all_gather_matmul(
        A, [B], 0, members.group_name, return_A=False
    )
    product: torch.Tensor = C
    return product
