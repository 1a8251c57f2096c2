"""Unfused references that ops are checked against and measured beside."""

from __future__ import annotations

import torch
import torch.distributed as dist


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
