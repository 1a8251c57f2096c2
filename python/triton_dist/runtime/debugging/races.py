"""Data races between ranks on symmetric memory, by vector clocks.

Each rank counts its releases, and knows of every other how many of its releases came before. A
release (``notify``) writes down beside the flag what its rank knows; an acquire (``wait``) learns
it; a collective lets all learn from all. Beside each element stands who last stored to it, and who
loaded it, at which count: what is not known to have come before is a race, whatever was read.

The programs of a rank count as one, and what copy streams and torch do is not seen, but their flags
and collectives are: so there are races that this does not find.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.runtime import addresses, symmetric
from triton_dist.runtime.debugging.accesses import Access, Undo, replace, undo_all
from triton_dist.runtime.debugging.faults import DataRace
from triton_dist.runtime.debugging.job import made_folder
from triton_dist.runtime.debugging.site import site
from triton_dist.runtime.device import cpu
from triton_dist.runtime.ranks.store_ranks import StoreRanks

_SHADOW = "~race"
# Columns of a shadow: who stored (rank + 1), at which count, on which line; then, a rank each, at
# which count it loaded, and what was released here.
_WHO, _COUNT, _LINE, _FIRST = 0, 1, 2, 3
# Those of them that this torch has. What tells one rank only is taken for telling all: too much is
# known then, which gives no false alarm.
_COLLECTIVES = (
    "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast",
    "broadcast_object_list", "reduce", "gather", "gather_object", "scatter",
    "scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip
_WORDS = ("meet", "decide", "gather", "maximum", "barrier", "align", "line_up")


_meant: list[str] | None = None  # races of calls that race on purpose


@contextmanager
def expected() -> Iterator[list[str]]:
    """Within: races that this rank finds go into the list that is given, and a call that races on
    purpose goes on. Where the check is off the list stays empty."""
    global _meant
    before, _meant = _meant, []
    try:
        yield _meant
    finally:
        _meant = before


def _report(message: str) -> None:
    if _meant is None:
        raise DataRace(message)
    _meant.append(message)


def with_shadows(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """``regions``, and beside each one a region for what is noted of its elements."""
    columns = _FIRST + 2 * knobs.world_size.get()
    shadows = {
        f"{name}{_SHADOW}": ((math.prod(shape), columns), torch.int32)
        for name, (shape, _) in regions.items()
    }
    return {**regions, **shadows}


class Races:
    """Refuses accesses of symmetric memory that race with those of another rank."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[int, int], Any] = {}  # by rank and size of the world: of a job
        self._board: tuple[Any, Any] = (None, None)
        self._turn = threading.Lock()

    def before(self, access: Access) -> None:
        for name, shadow, rows in _noted(access):
            rank, clock = knobs.rank.get(), self._clock()
            if access.kind == "atomic":
                if access.semantic in ("release", "acquire_release"):
                    with self._alone():  # several ranks may add to one flag
                        released = shadow[:, _FIRST + clock.size :]
                        released[rows] = np.maximum(released[rows], clock)
                        clock[rank] += 1
                continue
            if access.semantic == "volatile":
                continue
            who, count = shadow[rows, _WHO] - 1, shadow[rows, _COUNT]
            late = (who >= 0) & (who != rank) & (count > clock[who])
            if late.any():
                other, line = int(who[late][0]), int(shadow[rows, _LINE][late][0])
                _report(_message(access, name, rows[late], f"rank {other} stored", line))
            if access.kind == "load":
                shadow[rows, _FIRST + rank] = clock[rank]
                continue
            loads = shadow[rows, _FIRST : _FIRST + clock.size].copy()
            loads[:, rank] = 0
            if (loads > clock).any():
                row, other = np.argwhere(loads > clock)[0]
                _report(_message(access, name, rows[row:], f"rank {other} loaded", 0))
            shadow[rows, _WHO], shadow[rows, _COUNT] = rank + 1, clock[rank]
            shadow[rows, _LINE] = site().line

    def after(self, access: Access, values: Any) -> None:
        if access.semantic in ("acquire", "acquire_release"):
            for _, shadow, rows in _noted(access):
                self._learn(shadow[rows, _FIRST + self._clock().size :])
        elif access.semantic == "volatile":
            # Packets say by themselves that they have come. Who stores notes it before: to look at
            # the note before what came is read would be to miss a packet that comes in between.
            for _, shadow, rows in _noted(access):
                who, count = shadow[rows, _WHO] - 1, shadow[rows, _COUNT]
                np.maximum.at(self._clock(), who[who >= 0], count[who >= 0])

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within: no other thread of this rank, and no other rank of the host, is."""
        with self._turn, (made_folder() / "turn").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def track(self) -> Undo:
        """Note what collectives and flags of copy streams bring into an order, until undone."""

        def together(original: Any) -> Any:
            def meet(*args: Any, **named: Any) -> Any:
                self._publish()
                result = original(*args, **named)
                self._learn(self._boards())
                return result

            return meet

        def awaited(original: Any) -> Any:
            def wait(flags: torch.Tensor, index: int, *rest: Any) -> None:
                original(flags, index, *rest)
                self.after(_of_flag(flags, index, "acquire"), None)

            return wait

        def written(original: Any) -> Any:
            def write(stream: Any, flags: torch.Tensor, index: int, value: int) -> None:
                stream._queue(lambda: self.before(_of_flag(flags, index, "release")))
                original(stream, flags, index, value)

            return write

        def copied(original: Any) -> Any:
            def copy(stream: Any, destination: torch.Tensor, source: torch.Tensor) -> None:
                if destination.numel() == 1:  # a flag, which may be copied from another
                    stream._queue(lambda: self.before(_of_flag(destination, 0, "release")))
                original(stream, destination, source)

            return copy

        return undo_all(
            [
                *(replace(dist, name, together) for name in _COLLECTIVES if hasattr(dist, name)),
                *(replace(StoreRanks, name, together) for name in _WORDS),
                replace(cpu, "_spin_until_equal", awaited),
                replace(cpu.CpuCopyStream, "write_flag", written),
                replace(cpu.CpuCopyStream, "copy", copied),
                replace(symmetric, "regions_of", lambda _: with_shadows),
            ]
        )

    def _clock(self) -> Any:
        """Releases of each rank that came before, as this one knows."""
        rank, size = knobs.rank.get(), knobs.world_size.get()
        if (rank, size) not in self._clocks:
            clock = self._clocks[rank, size] = np.zeros(size, np.int32)
            clock[rank] = 1
        return self._clocks[rank, size]

    def _learn(self, rows: Any) -> None:
        clock = self._clock()
        if rows.size:
            np.maximum(clock, rows.reshape(-1, clock.size).max(0), out=clock)

    def _publish(self) -> None:
        rank = knobs.rank.get()
        self._boards()[rank] = self._clock()
        self._clock()[rank] += 1

    def _boards(self) -> Any:
        """A row of each rank, which all of this host map."""
        size, folder = knobs.world_size.get(), made_folder()
        if self._board[0] != (folder, size):
            path = folder / f"clocks-{size}"
            with path.open("ab") as file:
                file.truncate(4 * size * size)
            boards = np.memmap(path, np.int32, "r+", shape=(size, size))
            self._board = (folder, size), boards
        return self._board[1]


def _of_flag(flags: torch.Tensor, index: int, semantic: str) -> Access:
    address = flags.data_ptr() + index * flags.element_size()
    return Access("atomic", np.array([address], np.uint64), None, None, semantic)


def _noted(access: Access) -> list[tuple[str, Any, Any]]:
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
    columns = _FIRST + 2 * knobs.world_size.get()
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.int32).reshape(-1, columns)


def _message(access: Access, name: str, rows: Any, other: str, line: int) -> str:
    at = site()
    owner = "" if " of rank " in name else f" of rank {at.rank}"
    where = f" at line {line}" if line else ""
    return (
        f"{at}: {access.kind} of element {int(rows[0])} of {name}{owner}, which {other}{where}: no "
        "flag, and no collective, says that it was before"
    )
