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
    "default_group",
    "group_for",
    "process_group_of",
]


class _DefaultGroup:
    """The default process group as an attribute that ``torch.compile`` can trace. torch 2.11 cannot
    trace ``distributed_c10d.GroupMember.WORLD``, a property of a metaclass."""

    @property
    def WORLD(self) -> dist.ProcessGroup | None:
        """The default process group, or ``None`` if it is not initialised."""
        return distributed_c10d._world.default_pg


default_group: Any = _DefaultGroup()

Group = dist.ProcessGroup | DeviceMesh | None
"""Argument that selects ranks: a process group, a 1-D mesh, or ``None`` for the world."""

_solo = SoloRank()
# Weak: threads and sockets of a process group end when it is destroyed.
_groups: WeakKeyDictionary[dist.ProcessGroup, ProcessGroupRanks] = WeakKeyDictionary()
_groups_of_parent: set[dist.ProcessGroup] = set()
"""Groups of the parent process in a forked child, which is not a rank of these groups."""


def group_for(group: Group = None, scope: str = "world") -> ProcessGroupRanks | SoloRank:
    """Return an object for messages between the ranks of ``group``, by default of all ranks.

    The result is the same object as long as the process group exists. A new process group has a new
    object, even if it has the name of an earlier group.

    The result is a group of this rank alone for ``scope="rank"``, and without an initialised
    ``torch.distributed``. It is also this rank alone for the backend ``fake``, whose other ranks do
    not exist, and in a forked child for the groups of its parent.

    Raises:
        InvalidArgument: unknown scope, or a group that this rank does not belong to.
    """
    if scope not in ("world", "rank"):
        raise InvalidArgument("group_for", "scope", scope, "'world' or 'rank'")
    if scope == "rank":
        return _solo
    process_group = process_group_of(group)
    if (
        process_group is None
        or process_group in _groups_of_parent
        or dist.get_backend(process_group) == "fake"
    ):
        return _solo
    # One object per group and process: step counters must advance equally on all ranks.
    ranks = _groups.get(process_group)
    if ranks is None:
        ranks = _groups[process_group] = ProcessGroupRanks(process_group)
    return ranks


def process_group_of(group: Any) -> dist.ProcessGroup | None:
    """Return the process group that ``group`` selects: a process group itself, the group of a 1-D
    mesh, or for ``None`` the default group (``None`` if it is not initialised).

    Raises:
        InvalidArgument: ``group`` has another type, does not contain this rank, or was destroyed.
    """
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    process_group = group
    if isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is not None:
        with suppress(RuntimeError):  # the mesh's group was destroyed
            process_group = group.get_group()
    # ``new_group`` returns a number on ranks that are not members.
    if (
        not isinstance(process_group, dist.ProcessGroup)
        or process_group not in distributed_c10d._world.pg_map
    ):
        expected = "a process group that this rank belongs to, its 1-D DeviceMesh, or None"
        raise InvalidArgument("group_for", "group", group, expected)
    return process_group


def _forget_groups() -> None:
    """Drop all groups in a forked child: it must not use the connections of its parent."""
    _groups_of_parent.update(distributed_c10d._world.pg_map)
    _groups.clear()


os.register_at_fork(after_in_child=_forget_groups)
