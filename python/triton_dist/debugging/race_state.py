"""State of the race check: vector clocks, order within a rank, and a shadow of each element.

The check numbers its actors: the programs of a rank share the rank's number, and the copy streams
of a rank have the numbers after all ranks, in the same order.
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
from triton_dist.runtime.job import made_folder

_SHADOW = "~race"
WHO, COUNT, LINE, STORED, LOADED, FIRST = 0, 1, 2, 3, 4, 5
"""Columns: who stored (its number + 1), at which count, on which line, negative if by TMA; the
program that stored last, and the one that loaded last; then, for each number, at which count it
loaded, and what was released here."""


def own_rank() -> int:
    """Return this process's rank; 0 in a world of one, which may be given a rank of another."""
    return knobs.rank.get() % knobs.world_size.get()


def number_of(copying: bool) -> int:
    """Return the number of this rank's programs, or of its copy streams."""
    return own_rank() + (knobs.world_size.get() if copying else 0)


def how_many() -> int:
    """Return how many numbers there are."""
    return 2 * knobs.world_size.get()


def name_of(number: int) -> str:
    """Return what messages call a number."""
    rank = number % knobs.world_size.get()
    return f"rank {rank}" if rank == number else f"a copy stream of rank {rank}"


def _columns() -> int:
    return FIRST + 2 * how_many()


def with_shadows(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """``regions``, and beside each one a region for what is noted of its elements."""
    shadows = {
        f"{name}{_SHADOW}": ((math.prod(shape), _columns()), torch.int32)
        for name, (shape, _) in regions.items()
    }
    return {**regions, **shadows}


def noted(access: Access) -> list[tuple[str, Any, Any]]:
    """(name, shadow, rows) of each region of symmetric memory that is accessed."""
    if knobs.world_size.get() == 1:
        return []
    touched, found = np.asarray(access.touched()).view(np.int64), []
    if not touched.size:
        return []
    for begin, end, name in addresses.regions_between(int(touched.min()), int(touched.max())):
        shadow = _shadow_of(begin, name)
        if shadow is not None:
            rows = touched - begin
            if touched.min() < begin or touched.max() >= end:
                rows = rows[(rows >= 0) & (rows < end - begin)]
            if rows.size:
                rows //= (end - begin) // len(shadow)
                found.append((name, shadow, rows))
    return found


def _shadow_of(begin: int, name: str) -> Any:
    """The notes of the region that begins there: the next of its name, in the same allocation."""
    region, of, owner = name.partition(" of rank ")
    entry = addresses.next_named(begin, f"{region}{_SHADOW}{of}{owner}")
    if entry is None:
        return None
    address, nbytes = entry
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.int32).reshape(-1, _columns())


_instances = itertools.count()


class Clocks:
    """Knowledge of this rank: how many releases of each number came before.

    Attributes:
        copying: file and line that queued the copy that this thread does; no line: it does none.
    """

    def __init__(self) -> None:
        self.copying = _Copying()
        self._clocks: dict[tuple[int, int], Any] = {}  # by number and size of the world: of a job
        # Ranks begin checks alike; those of earlier ones have left their clocks in the folder.
        self._instance = next(_instances)
        self._board: tuple[Any, Any] = (None, None)

    @property
    def own(self) -> int:
        """Number of what this thread does."""
        return number_of(copying=bool(self.copying.line))

    @property
    def now(self) -> Any:
        """Clock of what this thread does."""
        return self._clock_of(self.own)

    def move_on(self, copying: bool = False) -> Any:
        """Return what this rank's programs, or its copy streams, know now; what they do from now on
        is not part of it."""
        number = number_of(copying)
        clock = self._clock_of(number)
        known = clock.copy()
        clock[number] += 1
        return known

    def learn(self, rows: Any) -> None:
        """Take over what others knew, a row each."""
        clock = self.now
        if rows.size:
            np.maximum(clock, rows.reshape(-1, clock.size).max(0), out=clock)

    def publish(self) -> None:
        """Let all ranks that ``learn`` the board know what this one knows."""
        self.board()[own_rank()] = self.move_on()

    def board(self) -> Any:
        """Return a row of each rank, which all of this host map."""
        size, folder = knobs.world_size.get(), made_folder()
        if self._board[0] != (folder, size):
            path = folder / f"clocks-{size}-{self._instance}"
            with path.open("ab") as file:
                file.truncate(4 * size * how_many())
            rows = np.memmap(path, np.int32, "r+", shape=(size, how_many()))
            self._board = (folder, size), rows
        return self._board[1]

    def _clock_of(self, number: int) -> Any:
        key = number, knobs.world_size.get()
        if key not in self._clocks:
            clock = self._clocks[key] = np.zeros(how_many(), np.int32)
            clock[number] = 1
        return self._clocks[key]


class _Copying(threading.local):
    """File and line that queued what this thread does; no line: it is no copy stream's."""

    file = ""
    line = 0


class ProgramOrder:
    """Up to which of its rank's releases each program knows what other programs did.

    All that came before the kernel is known to all. Then a flag says it: one that a program of the
    same rank released, in any memory, or one of another rank that knew of it.
    """

    def __init__(self) -> None:
        self._began = 0
        self._known: dict[int, int] = {}  # by program
        self._released: dict[int, int] = {}  # by address of the flag

    def begin(self, count: int) -> None:
        """Begin a kernel, before which there were ``count`` releases."""
        self._began = count
        self._known.clear()
        self._released.clear()

    @property
    def known(self) -> int:
        """Count up to which the running program knows what others did."""
        return self._known.get(current_program_number(), self._began)

    def learn(self, count: int) -> None:
        self._known[current_program_number()] = max(self.known, count)

    def release(self, flags: Iterable[int], count: int) -> None:
        for flag in flags:
            self._released[flag] = count

    def acquire(self, flags: Iterable[int]) -> None:
        self.learn(max((self._released.get(flag, 0) for flag in flags), default=0))
