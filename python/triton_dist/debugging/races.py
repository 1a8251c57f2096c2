"""Detect data races between ranks on symmetric memory with vector clocks.

Each rank has two *actors*: its programs, and its copy streams. An actor numbers its *releases*:
operations that set a flag (``notify``). The clock of an actor contains, for each actor, the last
release that the actor has observed. Each element of symmetric memory has a *shadow*, which stores
clocks and the last accesses.

To merge clocks, take the maximum of each entry. A release merges the actor's clock into the shadow
of the flag. An acquire (``wait``) merges this shadow into the waiting actor's clock. A collective
merges the clocks of all ranks. A copy begins with the clock at which it was queued. When programs
wait for a copy stream, they merge its clock. An access is a race if the actor has not observed the
last store to the element. A store is also a race if it has not observed the element's last loads.

TMA stores are asynchronous: a release orders them only after ``publish_tile`` or the end of the
kernel. Accesses by torch are not checked, so some races are not found. Torch's collectives count as
synchronisation.
"""

from __future__ import annotations

import fcntl
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.debugging.accesses import Access, Observer, Undo, patch, undo_all
from triton_dist.debugging.faults import DataRace
from triton_dist.debugging.kernel_location import current_location, kernel_frame
from triton_dist.debugging.race_state import (
    FIRST_CLOCK,
    READER_PROGRAM,
    WRITER,
    WRITER_COUNT,
    WRITER_LINE,
    WRITER_PROGRAM,
    Clocks,
    ProgramOrder,
    actor_name,
    shadows_of,
    with_shadows,
)
from triton_dist.runtime import interpreter, symmetric, waits
from triton_dist.runtime.device import cpu
from triton_dist.runtime.interpreter_program import current_program_number
from triton_dist.runtime.job import create_job_folder
from triton_dist.runtime.ranks.store_ranks import StoreRanks

_UNPUBLISHED = 2**31 - 1  # release number of an unpublished TMA store: no clock reaches it
_PROGRAM_BITS = 24  # of a recorded access: the program number is in these bits, the actor above
# Collectives of torch; some versions lack some of them. Each counts as a synchronisation of all
# ranks, even reduce or send. This misses races, but gives no false alarms.
_COLLECTIVES = (
    "barrier", "monitored_barrier", "all_reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_single", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_single", "all_to_all", "all_to_all_single", "broadcast",
    "broadcast_object_list", "reduce", "gather", "gather_object", "scatter",
    "scatter_object_list", "send", "recv", "isend", "irecv", "batch_isend_irecv",
)  # fmt: skip
_GROUP_COLLECTIVES = ("first_all_gather", "broadcast", "all_gather", "barrier", "device_barrier")


_RELEASES = ("release", "acquire_release")
_expected_races: list[str] | None = None  # races of calls that race on purpose


@contextmanager
def expected() -> Iterator[list[str]]:
    """Context manager that collects this rank's races in a list, for calls that race on purpose."""
    global _expected_races
    before, _expected_races = _expected_races, []
    try:
        yield _expected_races
    finally:
        _expected_races = before


class RaceCheck(Observer):
    """Raise ``DataRace`` for accesses to symmetric memory that race with an earlier access."""

    def __init__(self) -> None:
        self._clocks = Clocks()
        self._order = ProgramOrder()
        self._lock = threading.Lock()
        self._unpublished: dict[int, list[tuple[Any, Any]]] = {}  # by program

    def before(self, access: Access) -> None:
        if access.semantic in _RELEASES:
            self._release(access)
        if access.operation == "atomic" or access.semantic == "volatile":
            return
        actor, clock = self._clocks.own_actor, self._clocks.current_clock
        for name, shadow, rows in shadows_of(access):
            writer, count = shadow[rows, WRITER] - 1, shadow[rows, WRITER_COUNT]
            unordered = (writer >= 0) & (writer != actor) & (count > clock[writer])
            if unordered.any():
                other = int(writer[unordered][0])
                line = int(shadow[rows, WRITER_LINE][unordered][0])
                description = f"{actor_name(other)} stored at line {abs(line)}"
                by_tma = " by TMA; a flag orders TMA stores only after publish_tile" * (line < 0)
                self._report(access, name, rows[unordered], description + by_tma)
            program = self._check_programs(access, name, shadow, rows)
            if access.operation == "load":
                shadow[rows, FIRST_CLOCK + actor] = clock[actor]
                shadow[rows, READER_PROGRAM] = program
                continue
            loads = shadow[rows, FIRST_CLOCK : FIRST_CLOCK + clock.size].copy()
            loads[:, actor] = 0
            if (loads > clock).any():
                row, other = np.argwhere(loads > clock)[0]
                self._report(access, name, rows[row:], f"{actor_name(int(other))} loaded")
            shadow[rows, WRITER], shadow[rows, WRITER_COUNT] = actor + 1, clock[actor]
            shadow[rows, WRITER_PROGRAM], shadow[rows, READER_PROGRAM] = program, 0
            shadow[rows, WRITER_LINE] = self._clocks.queued_copy.line or current_location().line
            if access.by_tma:
                shadow[rows, WRITER_COUNT] = _UNPUBLISHED
                shadow[rows, WRITER_LINE] = -current_location().line
                self._unpublished.setdefault(program, []).append((shadow, rows))

    def _release(self, access: Access) -> None:
        actor, clock = self._clocks.own_actor, self._clocks.current_clock
        flags = shadows_of(access)
        with self._exclusive() if flags else nullcontext():  # several ranks may add to one flag
            for _, shadow, rows in flags:
                released = shadow[:, FIRST_CLOCK + clock.size :]
                released[rows] = np.maximum(released[rows], clock)
            if not self._clocks.queued_copy.line:
                self._order.release(access.accessed_addresses().tolist(), int(clock[actor]))
            clock[actor] += 1

    def _check_programs(self, access: Access, name: str, shadow: Any, rows: Any) -> int:
        """Raise if the access races with another program of this rank. Return the program's number
        for the columns ``WRITER_PROGRAM`` and ``READER_PROGRAM``; 0 for a copy."""
        if self._clocks.queued_copy.line:
            return 0
        actor, program = self._clocks.own_actor, self._program()
        observed = self._order.visible_clock
        recorded = shadow[rows]
        others = (recorded[:, WRITER_PROGRAM] >> _PROGRAM_BITS == actor) & (
            recorded[:, WRITER_PROGRAM] != program
        )
        unordered = (
            others & (recorded[:, WRITER] == actor + 1) & (recorded[:, WRITER_COUNT] > observed)
        )
        if unordered.any():
            first = recorded[unordered][0]
            number = _program_number(first[WRITER_PROGRAM])
            description = f"program {number} stored at line {abs(first[WRITER_LINE])}"
            self._report(access, name, rows[unordered], description)
        if access.operation == "store":
            others = (recorded[:, READER_PROGRAM] >> _PROGRAM_BITS == actor) & (
                recorded[:, READER_PROGRAM] != program
            )
            unordered = (
                others
                & (recorded[:, READER_PROGRAM] > 0)
                & (recorded[:, FIRST_CLOCK + actor] > observed)
            )
            if unordered.any():
                description = (
                    f"program {_program_number(recorded[unordered][0, READER_PROGRAM])} loaded"
                )
                self._report(access, name, rows[unordered], description)
        return program

    def _program(self) -> int:
        return (self._clocks.own_actor << _PROGRAM_BITS) + current_program_number() + 1

    def after(self, access: Access, values: Any) -> None:
        actor, in_program = self._clocks.own_actor, not self._clocks.queued_copy.line
        if access.semantic in ("acquire", "acquire_release"):
            if in_program:
                self._order.acquire(access.accessed_addresses().tolist())
            for _, shadow, rows in shadows_of(access):
                released = shadow[rows, FIRST_CLOCK + self._clocks.current_clock.size :]
                self._clocks.merge(released)
                if in_program:
                    self._order.merge(int(released[:, actor].max(initial=0)))
        elif access.semantic == "volatile":
            # Volatile loads read packets, which contain data and flag. A store updates the shadow
            # before the packet, and this method runs after the load: the shadow is not older.
            for _, shadow, rows in shadows_of(access):
                writer, count = shadow[rows, WRITER] - 1, shadow[rows, WRITER_COUNT]
                is_published = (writer >= 0) & (count < _UNPUBLISHED)
                np.maximum.at(self._clocks.current_clock, writer[is_published], count[is_published])
                # The shadow of a packet does not contain the releases of the sender's programs.
                # Assume that the running program is ordered after all releases of its own rank.
                self._order.merge(int(self._clocks.current_clock[actor]))

    def publish(self) -> None:
        """Complete the TMA stores of the running program."""
        self._complete(self._unpublished.pop(self._program(), ()))

    def _complete(self, stores: Iterable[tuple[Any, Any]]) -> None:
        actor = self._clocks.own_actor
        for shadow, rows in stores:
            is_pending = (shadow[rows, WRITER] == actor + 1) & (
                shadow[rows, WRITER_COUNT] == _UNPUBLISHED
            )
            shadow[rows[is_pending], WRITER_COUNT] = self._clocks.current_clock[actor]

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Context manager that excludes other threads of this rank and other ranks of the host."""
        with self._lock, (create_job_folder() / "turn").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def track(self) -> Undo:
        """Patch copy streams and collectives, to track them. Return a function that undoes this."""

        def synchronise(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._clocks.publish()
            result = original(*args, **kwargs)
            self._clocks.merge(self._clocks.shared_clocks())
            return result

        def queue_step(original: Any, stream: Any, step: Callable[[], object]) -> None:
            frame = kernel_frame()
            assert frame is not None
            observed, caller = self._clocks.advance(), (frame.f_code.co_filename, frame.f_lineno)

            def copy_step() -> None:
                self._clocks.queued_copy.file, self._clocks.queued_copy.line = caller
                self._clocks.merge(observed)
                step()

            original(stream, copy_step)

        def join_current(original: Any, stream: Any) -> None:
            original(stream)
            self._clocks.merge(self._clocks.advance(of_copy_streams=True))

        def run_grid(original: Any, *args: Any) -> None:
            self._order.begin(int(self._clocks.advance()[self._clocks.own_actor]))
            try:
                original(*args)
            finally:
                while self._unpublished:  # the end of the kernel completes its stores
                    self._complete(self._unpublished.popitem()[1])

        def await_flag(original: Any, flags: torch.Tensor, index: int, *rest: Any) -> None:
            original(flags, index, *rest)
            self.after(_access_to_flag(flags, index, "acquire"), None)

        def write_flag(
            original: Any, stream: Any, flags: torch.Tensor, index: int, value: int
        ) -> None:
            stream._queue(lambda: self.before(_access_to_flag(flags, index, "release")))
            original(stream, flags, index, value)

        def copy(
            original: Any, stream: Any, destination: torch.Tensor, source: torch.Tensor
        ) -> None:
            if destination.numel() == 1:  # one element is a flag, so the copy is a release
                accesses = [_access_to_flag(destination, 0, "release")]
            else:
                accesses = [_access_to_rows(source, "load"), _access_to_rows(destination, "store")]
            for access in accesses:
                stream._queue(functools.partial(self.before, access))
            original(stream, destination, source)

        return undo_all(
            [
                *(patch(dist, name, synchronise) for name in _COLLECTIVES if hasattr(dist, name)),
                *(patch(StoreRanks, name, synchronise) for name in _GROUP_COLLECTIVES),
                patch(cpu, "_spin_until_equal", await_flag),
                patch(cpu.CpuCopyStream, "write_flag", write_flag),
                patch(cpu.CpuCopyStream, "copy", copy),
                patch(cpu.CpuCopyStream, "_queue", queue_step),
                patch(cpu.CpuCopyStream, "join_current", join_current),
                patch(symmetric, "regions_to_allocate", lambda _, regions: with_shadows(regions)),
                patch(interpreter, "_run_grid", run_grid),
                patch(waits, "on_publish", lambda _: self.publish()),
            ]
        )

    def _report(self, access: Access, name: str, rows: Any, other: str) -> None:
        rank, copy = knobs.rank.get(), self._clocks.queued_copy
        queued_at = f"rank {rank}, copy queued at {copy.file}:{copy.line}"
        location = queued_at if copy.line else str(current_location())
        owner = "" if " of rank " in name else f" of rank {rank}"
        message = (
            f"{location}: {access.operation} of element {int(rows[0])} of {name}{owner}, "
            f"which {other}: "
            "neither a flag nor a collective orders the two accesses"
        )
        if _expected_races is None:
            raise DataRace(message)
        _expected_races.append(message)


def _program_number(recorded_program: int) -> int:
    return (recorded_program & ((1 << _PROGRAM_BITS) - 1)) - 1


def _access_to_rows(rows: torch.Tensor, operation: str) -> Access:
    begins = np.array([rows.data_ptr()], np.uint64)
    for size, stride in zip(rows.shape, rows.stride(), strict=True):
        steps = np.arange(size, dtype=np.int64) * (stride * rows.element_size())
        begins = (begins[:, None] + steps.astype(np.uint64)).ravel()
    return Access(operation, begins, None, None)


def _access_to_flag(flags: torch.Tensor, index: int, semantic: str) -> Access:
    address = flags.data_ptr() + index * flags.element_size()
    return Access("atomic", np.array([address], np.uint64), None, None, semantic)
