"""Data races between ranks on symmetric memory, by vector clocks.

Who is checked are the programs of each rank, which count as one, and its copy streams, which count
as another. Each counts its releases, and knows of every other how many of its releases came before.
A release (``notify``) writes down beside the flag what its rank knows; an acquire (``wait``) learns
it; a collective lets all learn from all. A copy knows what its rank knew when it was queued, and
whoever joins the stream learns what that knows. Beside each element stands who last stored to it,
and who loaded it, at which count: what is not known to have come before is a race, whatever was
read.

A store through a descriptor is not part of a release before ``publish_tile``, as TMA goes on
meanwhile; the end of the kernel completes it.

What torch does is not seen, but its collectives are: so there are races that this does not find.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.runtime import addresses, interpreter, symmetric, waits
from triton_dist.runtime.debugging.accesses import Access, Undo, replace, undo_all
from triton_dist.runtime.debugging.faults import DataRace
from triton_dist.runtime.debugging.job import made_folder
from triton_dist.runtime.debugging.site import kernel_frame, site
from triton_dist.runtime.device import cpu
from triton_dist.runtime.ranks.store_ranks import StoreRanks

_SHADOW = "~race"
# Columns of a shadow: who stored (its number + 1), at which count, on which line, negative if by
# TMA; then, for each, at which count it loaded, and what was released here. Numbers are those of
# ranks, and then, in the same order, those of their copy streams.
_WHO, _COUNT, _LINE, _FIRST = 0, 1, 2, 3
_UNPUBLISHED = 2**31 - 1  # a count that nobody knows
# Those of them that this torch has. What tells one rank only is taken for telling all: too much is
# known then, which gives no false alarm.
_COLLECTIVES = (
    "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast",
    "broadcast_object_list", "reduce", "gather", "gather_object", "scatter",
    "scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip
_instances = itertools.count()
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


def _rank() -> int:
    return knobs.rank.get() % knobs.world_size.get()  # a world of one may have a rank of another


def _columns() -> int:
    return _FIRST + 2 * _how_many()


def _how_many() -> int:
    return 2 * knobs.world_size.get()


def with_shadows(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """``regions``, and beside each one a region for what is noted of its elements."""
    shadows = {
        f"{name}{_SHADOW}": ((math.prod(shape), _columns()), torch.int32)
        for name, (shape, _) in regions.items()
    }
    return {**regions, **shadows}


class Races:
    """Refuses accesses of symmetric memory that race with those of another rank."""

    def __init__(self) -> None:
        self._clocks: dict[tuple[int, int], Any] = {}  # by number and size of the world: of a job
        # Ranks begin checks alike; those of earlier ones have left their clocks in the folder.
        self._instance = next(_instances)
        self._board: tuple[Any, Any] = (None, None)
        self._turn = threading.Lock()
        self._unpublished: dict[tuple[int, int, int], list[tuple[Any, Any]]] = {}  # by program
        self._copying = _Copying()

    def before(self, access: Access) -> None:
        for name, shadow, rows in _noted(access):
            own, clock = self._number(), self._clock()
            if access.kind == "atomic":
                if access.semantic in ("release", "acquire_release"):
                    with self._alone():  # several ranks may add to one flag
                        released = shadow[:, _FIRST + clock.size :]
                        released[rows] = np.maximum(released[rows], clock)
                        clock[own] += 1
                continue
            if access.semantic == "volatile":
                continue
            who, count = shadow[rows, _WHO] - 1, shadow[rows, _COUNT]
            late = (who >= 0) & (who != own) & (count > clock[who])
            if late.any():
                other, line = int(who[late][0]), int(shadow[rows, _LINE][late][0])
                said = f"{_called(other)} stored at line {abs(line)}"
                by_tma = " by TMA, of which a flag says nothing without publish_tile" * (line < 0)
                self._report(access, name, rows[late], said + by_tma)
            if access.kind == "load":
                shadow[rows, _FIRST + own] = clock[own]
                continue
            loads = shadow[rows, _FIRST : _FIRST + clock.size].copy()
            loads[:, own] = 0
            if (loads > clock).any():
                row, other = np.argwhere(loads > clock)[0]
                self._report(access, name, rows[row:], f"{_called(int(other))} loaded")
            shadow[rows, _WHO], shadow[rows, _COUNT] = own + 1, clock[own]
            shadow[rows, _LINE] = self._copying.line or site().line
            if access.by_tma:
                shadow[rows, _COUNT], shadow[rows, _LINE] = _UNPUBLISHED, -site().line
                program = interpreter.current_program()
                self._unpublished.setdefault(program, []).append((shadow, rows))

    def after(self, access: Access, values: Any) -> None:
        if access.semantic in ("acquire", "acquire_release"):
            for _, shadow, rows in _noted(access):
                self._learn(shadow[rows, _FIRST + self._clock().size :])
        elif access.semantic == "volatile":
            # Packets say by themselves that they have come. Who stores notes it before: to look at
            # the note before what came is read would be to miss a packet that comes in between.
            for _, shadow, rows in _noted(access):
                who, count = shadow[rows, _WHO] - 1, shadow[rows, _COUNT]
                known = (who >= 0) & (count < _UNPUBLISHED)
                np.maximum.at(self._clock(), who[known], count[known])

    def publish(self) -> None:
        """Complete what the running program has stored by TMA."""
        self._complete(self._unpublished.pop(interpreter.current_program(), ()))

    def _complete(self, stores: Iterable[tuple[Any, Any]]) -> None:
        own = self._number()
        for shadow, rows in stores:
            still = (shadow[rows, _WHO] == own + 1) & (shadow[rows, _COUNT] == _UNPUBLISHED)
            shadow[rows[still], _COUNT] = self._clock()[own]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within: no other thread of this rank, and no other rank of the host, is."""
        with self._turn, (made_folder() / "turn").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def track(self) -> Undo:
        """Note what copy streams do, and what collectives bring into an order, until undone."""

        def together(original: Any) -> Any:
            def meet(*args: Any, **named: Any) -> Any:
                self._publish()
                result = original(*args, **named)
                self._learn(self._boards())
                return result

            return meet

        def queued(original: Any) -> Any:
            def queue(stream: Any, step: Callable[[], object]) -> None:
                known, caller = self._left_behind(), _caller()

                def copying() -> None:
                    self._copying.file, self._copying.line = caller
                    self._learn(known)
                    step()

                original(stream, copying)

            return queue

        def joined(original: Any) -> Any:
            def join(stream: Any) -> None:
                original(stream)
                self._learn(self._left_behind(copying=True))

            return join

        def launched(original: Any) -> Any:
            def run_grid(*args: Any) -> None:
                try:
                    original(*args)
                finally:
                    while self._unpublished:  # the kernel is done
                        self._complete(self._unpublished.popitem()[1])

            return run_grid

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
                    noted = [_of_flag(destination, 0, "release")]
                else:
                    noted = [_of_rows(source, "load"), _of_rows(destination, "store")]
                for access in noted:
                    stream._queue(functools.partial(self.before, access))
                original(stream, destination, source)

            return copy

        return undo_all(
            [
                *(replace(dist, name, together) for name in _COLLECTIVES if hasattr(dist, name)),
                *(replace(StoreRanks, name, together) for name in _WORDS),
                replace(cpu, "_spin_until_equal", awaited),
                replace(cpu.CpuCopyStream, "write_flag", written),
                replace(cpu.CpuCopyStream, "copy", copied),
                replace(cpu.CpuCopyStream, "_queue", queued),
                replace(cpu.CpuCopyStream, "join_current", joined),
                replace(symmetric, "regions_of", lambda _: with_shadows),
                replace(interpreter, "_run_grid", launched),
                replace(waits, "on_publish", lambda _: self.publish),
            ]
        )

    def _report(self, access: Access, name: str, rows: Any, other: str) -> None:
        rank, copying = knobs.rank.get(), self._copying
        queued = f"rank {rank}, copy that {copying.file}:{copying.line} queued"
        at = queued if copying.line else str(site())
        owner = "" if " of rank " in name else f" of rank {rank}"
        message = (
            f"{at}: {access.kind} of element {int(rows[0])} of {name}{owner}, which {other}: no "
            "flag, and no collective, says that it was before"
        )
        if _meant is None:
            raise DataRace(message)
        _meant.append(message)

    def _number(self) -> int:
        """The one of this thread."""
        return _rank() + (knobs.world_size.get() if self._copying.line else 0)

    def _clock(self) -> Any:
        """Releases of each one that came before, as that of this thread knows."""
        return self._clock_of(self._number())

    def _clock_of(self, number: int) -> Any:
        key = number, knobs.world_size.get()
        if key not in self._clocks:
            clock = self._clocks[key] = np.zeros(_how_many(), np.int32)
            clock[number] = 1
        return self._clocks[key]

    def _left_behind(self, copying: bool = False) -> Any:
        """Return what this rank's programs, or its copy streams, know now; they then move on."""
        number = _rank() + (knobs.world_size.get() if copying else 0)
        clock = self._clock_of(number)
        known = clock.copy()
        clock[number] += 1
        return known

    def _learn(self, rows: Any) -> None:
        clock = self._clock()
        if rows.size:
            np.maximum(clock, rows.reshape(-1, clock.size).max(0), out=clock)

    def _publish(self) -> None:
        self._boards()[_rank()] = self._left_behind()

    def _boards(self) -> Any:
        """A row of each rank, which all of this host map."""
        size, folder = knobs.world_size.get(), made_folder()
        if self._board[0] != (folder, size):
            path = folder / f"clocks-{size}-{self._instance}"
            with path.open("ab") as file:
                file.truncate(4 * size * _how_many())
            boards = np.memmap(path, np.int32, "r+", shape=(size, _how_many()))
            self._board = (folder, size), boards
        return self._board[1]


class _Copying(threading.local):
    """File and line that queued what this thread does; no line: it is no copy stream's."""

    file = ""
    line = 0


def _called(number: int) -> str:
    rank = number % knobs.world_size.get()
    return f"rank {rank}" if rank == number else f"a copy stream of rank {rank}"


def _caller() -> tuple[str, int]:
    frame = kernel_frame()
    assert frame is not None
    return frame.f_code.co_filename, frame.f_lineno


def _of_rows(rows: torch.Tensor, kind: str) -> Access:
    begins = np.array([rows.data_ptr()], np.uint64)
    for size, stride in zip(rows.shape, rows.stride(), strict=True):
        steps = np.arange(size, dtype=np.int64) * (stride * rows.element_size())
        begins = (begins[:, None] + steps.astype(np.uint64)).ravel()
    return Access(kind, begins, None, None)


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
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.int32).reshape(-1, _columns())
