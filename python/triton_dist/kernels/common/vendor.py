"""AllGather-GEMM by what torch brings: candidates beside our own algorithms, never a fall-back that
is taken unmeasured."""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device


class VendorMethod(enum.Enum):
    """AllGather-GEMM by libraries of others; has no tiles, streams or chunks."""

    COLLECTIVE = "collective"
    """The group's all-gather (NCCL; gloo on CPU ranks), then ``torch.matmul``: no overlap."""
    ASYNC_TP = "async_tp"
    """``torch.ops.symm_mem.fused_all_gather_matmul``; on GPUs, in builds of torch that have it."""

    def __repr__(self) -> str:
        return str(self)


def methods_here() -> list[VendorMethod]:
    """Those that work on this process's device with this torch."""
    device = current_device()
    if device.has_libraries and _has_async_tp():
        return [VendorMethod.COLLECTIVE, VendorMethod.ASYNC_TP]
    return [VendorMethod.COLLECTIVE]


def candidates_here() -> list[VendorMethod]:
    """What a tuning tries: on GPUs all that works there. None on CPU ranks, which are there to run
    our kernels, and where an interpreted kernel would never win."""
    return methods_here() if current_device().has_libraries else []


def _has_async_tp() -> bool:
    import torch.distributed._symmetric_memory  # registers the operator

    return hasattr(torch.ops.symm_mem, "fused_all_gather_matmul")


def all_gather_into(
    rows: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Gather ``shard`` [m, K] of all ranks into ``rows`` [world size * m, K]."""
    # torch 2.13 gave the collective a new name and deprecates the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, shard, group=group)


def fused_all_gather_matmul(
    shard: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """``all_gather(shard) @ B`` by torch's async tensor parallelism."""
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    products = torch.ops.symm_mem.fused_all_gather_matmul(shard, [B], 0, name, return_A=False)[1]
    product: torch.Tensor = products[0]
    return product
