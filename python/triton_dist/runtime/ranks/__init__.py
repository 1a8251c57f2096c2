"""The ranks that act together: a process group, or this process alone."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.ranks.process_group import ProcessGroupRanks
from triton_dist.runtime.ranks.solo import SoloRank

__all__ = ["ProcessGroupRanks", "SoloRank", "default_group", "group_for"]

default_group: Any = distributed_c10d.GroupMember
"""Its attribute ``WORLD`` is the group of all ranks, as it is now; ``None`` without one."""

_groups: dict[str, ProcessGroupRanks] = {}


def group_for(
    group: dist.ProcessGroup | None = None, scope: str = "world"
) -> ProcessGroupRanks | SoloRank:
    """The ranks of ``group``; without one, the world if ``torch.distributed`` is initialised, else
    solo.

    ``scope="rank"`` gives solo always: this rank acts alone although there is a world.

    Raises:
        InvalidArgument: unknown scope, or a group that this rank does not belong to.
    """
    if scope not in ("world", "rank"):
        raise InvalidArgument("group_for", "scope", scope, "'world' or 'rank'")
    if scope == "rank" or (group is None and not dist.is_initialized()):
        return SoloRank()
    members = group if group is not None else dist.group.WORLD
    if members is None or dist.get_rank(members) < 0:
        raise InvalidArgument(
            "group_for", "group", group, "a process group that this rank belongs to"
        )
    # One object a group and process: its step counter must advance alike on all ranks.
    known = _groups.get(members.group_name)
    if known is None or known.process_group is not members:
        known = _groups[members.group_name] = ProcessGroupRanks(members)
    return known
