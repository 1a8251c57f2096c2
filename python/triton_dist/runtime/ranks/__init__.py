"""Groups of ranks: a process group, or this process alone."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.ranks.process import WorldRank
from triton_dist.runtime.ranks.solo import SoloRank
from triton_dist.runtime.ranks.store_ranks import ProcessGroupRanks, StoreRanks

__all__ = [
    "Group",
    "ProcessGroupRanks",
    "SoloRank",
    "StoreRanks",
    "WorldRank",
    "group_member",
    "group_for",
    "process_group_of",
]


class _DefaultGroup:
    """Replacement for ``distributed_c10d.GroupMember`` that works in compiled code. torch 2.11 does
    not evaluate a property of a metaclass there."""

    @property
    def WORLD(self) -> dist.ProcessGroup | None:
        """The current world, or ``None``."""
        return distributed_c10d._world.default_pg


group_member: Any = _DefaultGroup()

Group = dist.ProcessGroup | DeviceMesh | None
"""Argument that selects ranks: a process group, a 1-D mesh, or ``None`` for the world."""

_solo = SoloRank()
# Weak: threads and sockets of a process group end when it is destroyed.
_groups: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRanks] = WeakKeyDictionary()
_inherited: set[dist.ProcessGroup] = set()
"""Groups inherited by a forked process, which is not a rank of them."""


def group_for(group: Group = None, scope: str = "world") -> ProcessGroupRanks | SoloRank:
    """Return the ranks of ``group``, by default of the world; without a world, a group of one.

    Returns the same object as long as the process group exists. A new world, or a new group with an
    old name, gives a new object.

    ``scope="rank"`` always returns a group of one. So do groups with the backend ``fake``, whose
    other ranks do not exist, and groups inherited by a fork.

    Raises:
        InvalidArgument: unknown scope, or a group that this rank does not belong to.
    """
    if scope not in ("world", "rank"):
        raise InvalidArgument("group_for", "scope", scope, "'world' or 'rank'")
    if scope == "rank":
        return _solo
    members = process_group_of(group)
    if members is None or members in _inherited or dist.get_backend(members) == "fake":
        return _solo
    # One object per group and process: step counters must advance equally on all ranks.
    known = _groups.get(members)
    if known is None:
        known = _groups[members] = ProcessGroupRanks(members)
    return known


def process_group_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group of a group or 1-D mesh, the world for ``None``, or ``None`` if
    there is no world.

    Raises:
        InvalidArgument: another type, a group without this rank, or a destroyed group.
    """
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    members = group
    if isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is not None:
        with suppress(RuntimeError):  # its group was destroyed
            members = group.get_group()
    # ``new_group`` returns a number on ranks that are not members.
    if not isinstance(members, dist.ProcessGroup) or members not in distributed_c10d._world.pg_map:
        expected = "a process group that this rank belongs to, its 1-D DeviceMesh, or None"
        raise InvalidArgument("group_for", "group", group, expected)
    return members


def _forget_groups() -> None:
    """Drop all groups in a forked child: it must not use the connections of its parent."""
    _inherited.update(distributed_c10d._world.pg_map)
    _groups.clear()


os.register_at_fork(after_in_child=_forget_groups)
