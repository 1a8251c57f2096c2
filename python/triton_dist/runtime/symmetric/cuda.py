"""Symmetric memory on GPUs of one host, by ``torch.distributed._symmetric_memory``.

Kernels access the memory of other ranks through mapped addresses over NVLink, without multicast.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from triton_dist.errors import SymmetricMemoryFull
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric.block import Layout, SymmetricMemory


class CudaSymmetricMemory(SymmetricMemory):
    def __init__(self, layout: Layout, device: torch.device, group: dist.ProcessGroup) -> None:
        ranks = group_for(group)
        block: torch.Tensor | None = None
        try:
            block = symm_mem.empty(layout.nbytes, dtype=torch.uint8, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as failure:
            reason = str(failure)
        else:
            reason = ""
        # The rendezvous below hangs if a rank has failed, so ranks exchange their errors first.
        for rank, error in enumerate(layout.check_and_gather(ranks, reason)):
            if error:
                free = torch.cuda.mem_get_info(device)[0] if rank == ranks.rank else 0
                raise SymmetricMemoryFull(
                    f"{layout.name}, rank {ranks.global_rank(rank)} ({error})",
                    layout.nbytes,
                    free,
                    "Use a smaller context, or free GPU memory.",
                )
        assert block is not None
        self._handle: Any = symm_mem.rendezvous(block, group)
        blocks = [
            block
            if peer == ranks.rank
            else self._handle.get_buffer(peer, (layout.nbytes,), torch.uint8)
            for peer in range(ranks.size)
        ]
        super().__init__(layout, ranks.rank, blocks, ranks.global_rank)
        block.zero_()
        torch.cuda.synchronize(device)
        ranks.barrier("symmetric memory is zeroed")

    def barrier(self) -> None:
        self._handle.barrier(channel=0)

    def free(self) -> None:
        super().free()
        self._handle = None


@functools.cache  # ops check this in each call
def has_operator(name: str) -> bool:
    """Return whether this torch has ``torch.ops.symm_mem.<name>``."""
    return hasattr(torch.ops.symm_mem, name)


def group_name(group: dist.ProcessGroup | None) -> Any:
    """Enable symmetric memory for ``group`` (default: the world) and return the group's name, which
    ``torch.ops.symm_mem`` takes."""
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    _enable(name)
    return name


@functools.cache
def _enable(name: Any) -> None:
    """Enable symmetric memory for a group. Required before torch 2.11, deprecated since."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        symm_mem.enable_symm_mem_for_group(name)
