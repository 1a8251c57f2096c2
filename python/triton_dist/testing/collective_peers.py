"""What the plain collectives are measured beside, and what they must give."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from triton_dist.kernels.common import vendor, vendor_reduce_scatter
from triton_dist.runtime.device import current_device
from triton_dist.testing.overlap import Candidate

LIBRARY, IN_PLACE = "library", "library, in place"
ONE_SHOT, TWO_SHOT = "torch one-shot", "torch two-shot"

# Between two sums of parts in different orders, in the dtype: rtol = atol.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 1e-3}


def expected_of(op: str, x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """What ``op`` must give for x as it is now, added in fp32 and rounded once. Collective."""
    if op == "all_gather":
        return _gathered(x, group)
    total = x.float()
    dist.all_reduce(total, group=group)
    if op == "reduce_scatter":
        rows = x.shape[0] // dist.get_world_size(group)
        rank = dist.get_rank(group)
        total = total[rank * rows : (rank + 1) * rows]
    return total.to(x.dtype)


def collective_peers(
    op: str, x: torch.Tensor, group: dist.ProcessGroup | None = None
) -> dict[str, Candidate]:
    """By name: the collective of the library (NCCL, gloo on CPU ranks), out of place. Of an
    all-reduce also the same in place, without the copy, on zeros, unchecked; and on GPUs torch's
    own over symmetric memory, whose input is copied there first. Collective over ``group``."""

    def expected() -> torch.Tensor:
        return expected_of(op, x, group)

    calls: dict[str, Callable[[], torch.Tensor]] = {
        LIBRARY: {
            "all_reduce": lambda: _summed(x, group),
            "reduce_scatter": lambda: _scattered(x, group),
            "all_gather": lambda: _gathered(x, group),
        }[op]
    }
    if op == "all_reduce" and current_device().name == "cuda" and dist.get_world_size(group) > 1:
        calls |= over_symmetric_memory(x, lambda staged: staged.copy_(x), group)
    peers = {name: Candidate("peer", call, expected) for name, call in calls.items()}
    if op == "all_reduce":
        zeros = torch.zeros_like(x)
        peers[IN_PLACE] = Candidate("peer", lambda: _summed_in_place(zeros, group))
    return peers


def _summed(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def _summed_in_place(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    dist.all_reduce(x, group=group)
    return x


def _scattered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    out = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    vendor_reduce_scatter.reduce_scatter_into(out, x, group)
    return out


def _gathered(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    out = x.new_empty((x.shape[0] * dist.get_world_size(group), *x.shape[1:]))
    vendor.all_gather_into(out, x, group)
    return out


def over_symmetric_memory(
    like: torch.Tensor,
    fill: Callable[[torch.Tensor], object],
    group: dist.ProcessGroup | None,
) -> dict[str, Callable[[], torch.Tensor]]:
    """torch's all-reduces of a tensor like ``like`` in symmetric memory, which ``fill`` writes to
    at each call. Collective over ``group``; for GPUs."""
    import torch.distributed._symmetric_memory as symm_mem  # registers the operators

    members = group or dist.distributed_c10d._get_default_group()
    staged = symm_mem.empty(like.shape, dtype=like.dtype, device=like.device)
    symm_mem.rendezvous(staged, members)

    def one_shot() -> torch.Tensor:
        fill(staged)
        out: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(
            staged, "sum", members.group_name
        )
        return out

    def two_shot() -> torch.Tensor:
        fill(staged)
        torch.ops.symm_mem.two_shot_all_reduce_(staged, "sum", members.group_name)
        return staged

    return {ONE_SHOT: one_shot, TWO_SHOT: two_shot}
