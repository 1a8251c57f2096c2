"""GEMM-ReduceScatter by what torch brings: candidates beside our own algorithms, never a fall-back
that is taken unmeasured."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common.vendor import VendorMethod
from triton_dist.runtime.device import current_device


def methods_here() -> list[VendorMethod]:
    """Those that work on this process's device with this torch."""
    device = current_device()
    if device.has_libraries and _has_async_tp():
        return [VendorMethod.COLLECTIVE, VendorMethod.ASYNC_TP]
    return [VendorMethod.COLLECTIVE]


def candidates_here() -> list[VendorMethod]:
    """What a tuning tries: on GPUs all that works there, on CPU ranks none (see ``vendor``)."""
    return methods_here() if current_device().has_libraries else []


def _has_async_tp() -> bool:
    import torch.distributed._symmetric_memory  # registers the operator

    return hasattr(torch.ops.symm_mem, "fused_matmul_reduce_scatter")


def reduce_scatter(product: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks of ``product`` [M, N]: [M / world size, N]."""
    rows = product.shape[0] // dist.get_world_size(group)
    out = product.new_empty((rows, product.shape[1]))
    reduce_scatter_into(out, product, group)
    return out


def reduce_scatter_into(
    out: torch.Tensor, addend: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """The same into ``out`` [n, …], of ``addend`` [world size * n, …]."""
    # torch 2.13 gave the collective a new name and deprecates the old one.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(out, addend, group=group)


def fused_matmul_reduce_scatter(
    A: torch.Tensor, B: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """This rank's rows of the sum of ``A @ B`` by torch's async tensor parallelism."""
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    rows: torch.Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(A, B, "sum", 0, name)
    return rows
