"""State of the race check: vector clocks, the order of a rank's programs, and shadows of elements.

An *actor* is either all programs of a rank (number: the rank) or the copy streams of a rank
(number: the rank plus the world size). A *release* is an operation of an actor that sets a flag;
each actor counts its releases. The *shadow* of an element is a row of numbers about its last store
and its last loads.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from triton_dist import knobs
from triton_dist.debugging.accesses import Access
from triton_dist.runtime import addresses
from triton_dist.runtime.interpreter_program import current_program_number
from triton_dist.runtime.job import create_job_folder

_SHADOW = "~race"  # A shadow region has the name of its region with this suffix.
WRITER, WRITER_COUNT, WRITER_LINE, WRITER_PROGRAM, READER_PROGRAM, FIRST_CLOCK = 0, 1, 2, 3, 4, 5
"""Columns of a shadow. Last store: actor (number + 1), its release count, line (negative for TMA),
program. Last load: program. The columns from ``FIRST_CLOCK`` on are the release count of each actor
at its last load, and the clock of the last releases to this element, if it is a flag."""


def own_rank() -> int:
    """Return this process's rank; 0 if the world has a single rank, whatever ``RANK`` is."""
    return knobs.rank.get() % knobs.world_size.get()


def actor_number(of_copy_streams: bool) -> int:
    """Return the actor number of this rank's programs, or of its copy streams."""
    return own_rank() + (knobs.world_size.get() if of_copy_streams else 0)


def num_actors() -> int:
    return 2 * knobs.world_size.get()


def actor_name(number: int) -> str:
    rank = number % knobs.world_size.get()
    return f"rank {rank}" if rank == number else f"a copy stream of rank {rank}"


def _columns() -> int:
    return FIRST_CLOCK + 2 * num_actors()


def with_shadows(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return ``regions`` and a shadow region for each of them, which has a row per element."""
    shadows = {
        f"{name}{_SHADOW}": ((math.prod(shape), _columns()), torch.int32)
        for name, (shape, _) in regions.items()
    }
    return {**regions, **shadows}


def shadows_of(access: Access) -> list[tuple[str, Any, Any]]:
    """Return name, shadow region and accessed rows of each symmetric region that is accessed."""
    if knobs.world_size.get() == 1:
        return []
    accessed_addresses, found = np.asarray(access.accessed_addresses()).view(np.int64), []
    if not accessed_addresses.size:
        return []
    for begin, end, name in addresses.regions_between(
        int(accessed_addresses.min()), int(accessed_addresses.max())
    ):
        shadow = _shadow_of(begin, name)
        if shadow is not None:
            rows = accessed_addresses - begin
            if accessed_addresses.min() < begin or accessed_addresses.max() >= end:
                rows = rows[(rows >= 0) & (rows < end - begin)]
            if rows.size:
                rows //= (end - begin) // len(shadow)
                found.append((name, shadow, rows))
    return found


def _shadow_of(begin: int, name: str) -> Any:
    """Return the shadow of the region at ``begin``, which follows it in the same allocation."""
    region, of, owner = name.partition(" of rank ")
    entry = addresses.next_region_named(begin, f"{region}{_SHADOW}{of}{owner}")
    if entry is None:
        return None
    address, nbytes = entry
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.int32).reshape(-1, _columns())


_instances = itertools.count()


class Clocks:
    """The vector clocks of this rank. A clock contains the last observed release of each actor.

    Attributes:
        queued_copy: file and line that queued the copy of this thread; line 0: there is no copy.
    """

    def __init__(self) -> None:
        self.queued_copy = _QueuedCopy()
        self._clocks: dict[tuple[int, int], Any] = {}  # by actor and size of the world
        # This number is part of a file name, because earlier checks have left files in the folder.
        # It is equal on all ranks, because they start checks in the same order.
        self._instance = next(_instances)
        self._shared: tuple[Any, Any] = (None, None)

    @property
    def own_actor(self) -> int:
        """Number of the actor that this thread belongs to."""
        return actor_number(of_copy_streams=bool(self.queued_copy.line))

    @property
    def current_clock(self) -> Any:
        """Clock of the actor that this thread belongs to."""
        return self._clock_of(self.own_actor)

    def advance(self, of_copy_streams: bool = False) -> Any:
        """Count a release of this rank's programs or copy streams. Return the clock before it."""
        number = actor_number(of_copy_streams)
        clock = self._clock_of(number)
        previous = clock.copy()
        clock[number] += 1
        return previous

    def merge(self, rows: Any) -> None:
        """Merge ``rows``, the clocks of other actors, into the clock of this thread's actor."""
        clock = self.current_clock
        if rows.size:
            np.maximum(clock, rows.reshape(-1, clock.size).max(0), out=clock)

    def publish(self) -> None:
        """Copy this rank's clock to ``shared_clocks``, for other ranks to merge."""
        self.shared_clocks()[own_rank()] = self.advance()

    def shared_clocks(self) -> Any:
        """Return the published clock of each rank, in memory that all ranks of this host map."""
        size, folder = knobs.world_size.get(), create_job_folder()
        if self._shared[0] != (folder, size):
            path = folder / f"clocks-{size}-{self._instance}"
            with path.open("ab") as file:
                file.truncate(4 * size * num_actors())
            rows = np.memmap(path, np.int32, "r+", shape=(size, num_actors()))
            self._shared = (folder, size), rows
        return self._shared[1]

    def _clock_of(self, number: int) -> Any:
        key = number, knobs.world_size.get()
        if key not in self._clocks:
            clock = self._clocks[key] = np.zeros(num_actors(), np.int32)
            clock[number] = 1
        return self._clocks[key]


class _QueuedCopy(threading.local):
    file = ""
    line = 0


class ProgramOrder:
    """The last release of this rank that each program of the running kernel has observed.

    All programs have observed the releases before their kernel. If a program acquires a flag, it
    observes the release that set the flag. The flag may also be set by another rank that has
    observed a release of this rank.
    """

    def __init__(self) -> None:
        self._began = 0  # last release before the kernel
        self._observed: dict[int, int] = {}  # by program
        self._released: dict[int, int] = {}  # by address of the flag

    def begin(self, count: int) -> None:
        """Begin a kernel. ``count`` is the number of releases before the kernel."""
        self._began = count
        self._observed.clear()
        self._released.clear()

    @property
    def visible_clock(self) -> int:
        """The last release of this rank that the running program has observed."""
        return self._observed.get(current_program_number(), self._began)

    def merge(self, count: int) -> None:
        self._observed[current_program_number()] = max(self.visible_clock, count)

    def release(self, flags: Iterable[int], count: int) -> None:
        for flag in flags:
            self._released[flag] = count

    def acquire(self, flags: Iterable[int]) -> None:
        self.merge(max((self._released.get(flag, 0) for flag in flags), default=0))
