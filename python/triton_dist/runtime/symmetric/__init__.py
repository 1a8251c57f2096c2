"""Symmetric memory: named regions, equal on all ranks. Each rank maps the regions of all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.location import RankLocation, share_a_gpu, sharing_error
from triton_dist.runtime.ranks import Group, group_for, process_group_of
from triton_dist.runtime.symmetric.block import Layout, Region, SoloSymmetricMemory, SymmetricMemory
from triton_dist.runtime.symmetric.cuda import CudaSymmetricMemory
from triton_dist.runtime.symmetric.host import HostSymmetricMemory
from triton_dist.runtime.symmetric.shared_gpu import SharedGpuSymmetricMemory

__all__ = ["Region", "SymmetricMemory", "allocate"]


def allocate(
    name: str, regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]], group: Group = None
) -> SymmetricMemory:
    """Allocate zero-filled symmetric memory and divide it into named regions. Collective.

    Args:
        name: name of the memory in error messages.
        regions: shape and dtype of each region, by its name; equal on all ranks.
        group: the ranks; default: all ranks, or this process alone without torch.distributed.

    Raises:
        InvalidArgument: a value of ``regions`` is not a pair of shape and dtype.
        RankDisagreement: ranks request different regions.
        SymmetricMemoryFull: on every rank, if any rank has too little memory.
        DeviceUnavailable: on every rank, if ranks that share a GPU cannot map each other's memory.
    """
    layout = Layout.of(name, regions_to_allocate(regions))
    device = current_device()
    group = process_group_of(group)
    # In inference mode torch would allocate inference tensors, which copy threads cannot write.
    with torch.inference_mode(False):
        if group is None or dist.get_world_size(group) == 1:
            return SoloSymmetricMemory(layout, device.torch_device)
        if device.name == "cuda":
            ranks = group_for(group)
            locations = ranks.all_gather(
                "GPUs of the ranks", RankLocation.of(device.torch_device.index)
            )
            if not share_a_gpu(locations):
                return CudaSymmetricMemory(layout, device.torch_device, group)
            error = sharing_error(locations, ranks.global_rank)
            if error is not None:
                raise error
            return SharedGpuSymmetricMemory(layout, device.torch_device, group)
        return HostSymmetricMemory(layout, group)


def regions_to_allocate(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return ``regions``. The race check replaces this function to allocate more regions."""
    return regions
