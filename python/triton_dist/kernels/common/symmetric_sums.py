"""torch's all-reduce of tensors in symmetric memory: a candidate, and a peer of benchmarks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device
from triton_dist.runtime.symmetric.cuda import group_name, has_operator

# Bytes of a vector of the operator, which takes no tensor that is not whole vectors well.
_VECTOR_BYTES = 16


def sums_symmetric_memory(dtype: torch.dtype, row_bytes: int) -> bool:
    """Tell whether ``two_shot_all_reduce`` works on this process's device, for any number of such
    rows."""
    fits = dtype in (torch.bfloat16, torch.float32) and row_bytes % _VECTOR_BYTES == 0
    return fits and current_device().has_async_tp and has_operator("two_shot_all_reduce_out")


def two_shot_all_reduce(
    addend: torch.Tensor, group: dist.ProcessGroup | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The sum of ``addend`` over all ranks, in ``out``, or else in its place. ``addend`` lies in
    symmetric memory, at the same place on every rank, and is overwritten. All ranks have come when
    it begins, and nobody reads ``addend`` when it ends."""
    name = group_name(group)
    if out is None:
        torch.ops.symm_mem.two_shot_all_reduce_(addend, "sum", name)
        return addend
    torch.ops.symm_mem.two_shot_all_reduce_out(addend, "sum", name, out)
    return out
