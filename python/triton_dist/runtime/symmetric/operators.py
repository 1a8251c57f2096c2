"""torch's own operators on symmetric memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem  # registers them


@functools.cache  # a call may ask it
def has_operator(name: str) -> bool:
    """Tell whether this torch has ``torch.ops.symm_mem.<name>``."""
    return hasattr(torch.ops.symm_mem, name)


def group_name(group: dist.ProcessGroup | None) -> Any:
    """The name by which operators know ``group``, which may use symmetric memory from now on."""
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    _enable(name)
    return name


@functools.cache
def _enable(name: Any) -> None:
    """Let a group use symmetric memory, which torch before 2.11 has to be told; since then it is
    needless, and deprecated."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        symm_mem.enable_symm_mem_for_group(name)
