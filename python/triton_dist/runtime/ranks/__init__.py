"""The ranks that act together: a process group, or this process alone."""

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
    "default_group",
    "group_for",
    "process_group_of",
]


class _DefaultGroup:
    """Stands for ``distributed_c10d.GroupMember``, also in compiled code: there torch 2.11 does not
    know the value of a property of a metaclass, and takes no world for one."""

    @property
    def WORLD(self) -> dist.ProcessGroup | None:
        """The group of all ranks, as it is now; ``None`` without one."""
        return distributed_c10d._world.default_pg


default_group: Any = _DefaultGroup()

Group = dist.ProcessGroup | DeviceMesh | None
"""Argument of every function that asks for ranks: a process group, a mesh of one dimension, or
``None`` for the world."""

_solo = SoloRank()
# Weak: threads and sockets of a process group end when it is destroyed.
_groups: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRanks] = WeakKeyDictionary()
_inherited: set[dist.ProcessGroup] = set()
"""Groups of the parent of a forked process, which is no rank of them."""


def group_for(group: Group = None, scope: str = "world") -> ProcessGroupRanks | SoloRank:
    """The ranks of ``group``; without one, the world if ``torch.distributed`` is initialised, else
    solo. The same object as long as the process group lives: a world that is initialised anew, or a
    group whose name is used again, is another one.

    ``scope="rank"`` gives solo always: this rank acts alone although there is a world. So does a
    group whose other ranks do not exist (backend ``fake``), and one that a fork has inherited.

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
    # One object a group and process: its step counter must advance alike on all ranks.
    known = _groups.get(members)
    if known is None:
        known = _groups[members] = ProcessGroupRanks(members)
    return known


def process_group_of(group: Any) -> dist.ProcessGroup | None:
    """The process group that ``group`` stands for: itself, the one of a mesh of one dimension, or
    for ``None`` the world; ``None`` if there is no world.

    Raises:
        InvalidArgument: anything else, or a group that this rank does not belong to, or that was
            destroyed.
    """
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    members = group
    if isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is not None:
        with suppress(RuntimeError):  # its group was destroyed
            members = group.get_group()
    # What ``new_group`` gives to a rank that is left out is a number.
    if not isinstance(members, dist.ProcessGroup) or members not in distributed_c10d._world.pg_map:
        expected = "a process group that this rank belongs to, a 1-D DeviceMesh of one, or None"
        raise InvalidArgument("group_for", "group", group, expected)
    return members


def _forget_groups() -> None:
    """In the child of a fork, which shares the connections of its parent and must not use them."""
    _inherited.update(distributed_c10d._world.pg_map)
    _groups.clear()


os.register_at_fork(after_in_child=_forget_groups)
