"""Run the programs of a grid in one process without a GPU, so that they may wait for each other.

On a GPU the resident programs of a grid make progress together, and a program may spin on a flag
that another program sets. Here programs run in order on the calling thread until a program *pauses*
in a wait. The paused program keeps its thread, and a new thread starts the remaining programs.

Exactly one program runs at any time. Its turn ends when the program pauses or ends. Turns are
assigned round robin, so each run is deterministic. A program that passes ``unchanged`` to ``pause``
gets no turn before the awaited value has changed: a call of ``unchanged`` takes 1 µs, a turn 100
µs. This module does not depend on Triton.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

MIN_PAUSE_SECONDS = 200e-6
"""First pause of a waiting program if no other program of its grid can run. This is about the time
of a poll, and long enough for a copy thread or another process to run."""
MAX_PAUSE_SECONDS = 5e-3
"""Maximum pause. Waits shorter than about 0.1 s do not reach it."""
_PAUSE_PER_TIME_WAITED = 1 / 16
"""Ratio of a pause to the time waited so far, for waits that check ``unchanged``."""

Unchanged: TypeAlias = Callable[[], bool]
"""Returns True while a waiting program would read the same value as at its last poll."""


class _Stop(BaseException):
    """Unwinds a paused program of a grid in which another program failed."""


class _ProgramThread:
    """A thread that runs programs, but only in its turn."""

    def __init__(self) -> None:
        self._turn = False
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.unchanged: Unchanged | None = None
        """``None``: the program takes its turn unconditionally."""

    def can_continue(self) -> bool:
        return self.unchanged is None or not self.unchanged()

    def give_turn(self) -> None:
        self._turn = True
        self._signals.put(None)

    def await_turn(self, interrupted: Callable[[BaseException], None]) -> None:
        """Block until :meth:`give_turn`. If a signal handler raises an exception, pass it to
        ``interrupted`` and keep waiting. If the wait ended without the turn, two programs would run
        at the same time."""
        while not self._turn:
            try:
                self._signals.get()
            except BaseException as error:
                interrupted(error)
        self._turn = False


class _Local(threading.local):
    grid: CooperativeGrid | None = None
    worker: _ProgramThread | None = None


_local = _Local()


class CooperativeGrid:
    """Runner of a grid of ``num_programs`` programs; ``run_program(i)`` runs program ``i``.

    Args:
        num_programs: number of programs.
        run_program: function that runs a program.
        state: dictionary that describes the running program (the interpreter's builder). It is
            saved when a program pauses and restored when the program continues.
        max_resident_programs: maximum number of programs that have started and not ended, as on a
            GPU with room for this number of programs; ``None``: unlimited.
    """

    def __init__(
        self,
        num_programs: int,
        run_program: Callable[[int], None],
        state: dict[str, Any],
        max_resident_programs: int | None = None,
    ) -> None:
        self._num_programs, self._run_program, self._state = num_programs, run_program, state
        self._max_resident_programs = (
            num_programs if max_resident_programs is None else max_resident_programs
        )
        self._next_program = 0
        self._starter = _ProgramThread()  # the only thread that starts programs
        self._ready: deque[_ProgramThread] = deque()  # every thread except the running one
        self._num_pauses = 0  # since a program last started or ended
        self._threads: list[threading.Thread] = []
        self._all_done = _ProgramThread()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run all programs. The first exception of any program ends the grid and is raised here.
        All threads have ended when this returns or raises."""
        outer = _local.grid, _local.worker
        try:
            self._run_programs(self._starter)
        finally:
            _local.grid, _local.worker = outer
        if self._ready:
            self._ready.popleft().give_turn()
            self._all_done.await_turn(self._fail)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def pause(self, seconds: float, unchanged: Unchanged | None = None) -> bool:
        """End the running program's turn. The running program calls this.

        Returns when the program gets its next turn. With ``unchanged``, the program gets no turn
        before ``unchanged`` returns False. Without ``unchanged``, sleeps ``seconds`` if every
        program waits. Returns ``False`` immediately if the grid has no other program to run.
        """
        worker = _local.worker
        assert worker is not None, "only a program of this grid can pause it"
        if self._starts_next(worker) and 1 + len(self._ready) < self._max_resident_programs:
            self._starter = _ProgramThread()
            self._start_thread(self._starter)
            self._ready.appendleft(self._starter)
        if not self._ready:
            return False
        worker.unchanged = unchanged
        if unchanged is None:
            self._num_pauses += 1
            if self._num_pauses > len(self._ready):  # all wait for something outside this grid
                self._num_pauses = 0
                time.sleep(seconds)
        for sleep_seconds in _poll_intervals():
            if self._error is not None:
                raise _Stop
            if (other := self._next_runnable()) is not None:
                self._pass_turn(worker, other)
                break
            if worker.can_continue():
                break
            time.sleep(sleep_seconds)
        return True

    def _run_programs(self, worker: _ProgramThread) -> None:
        """Start programs in order until this thread's program pauses and another continues."""
        _local.grid, _local.worker = self, worker
        try:
            while self._starts_next(worker) and self._error is None:
                program, self._next_program = self._next_program, self._next_program + 1
                self._num_pauses = 0
                self._run_program(program)
                self._num_pauses = 0
                if self._starts_next(worker) and (other := self._next_runnable()) is not None:
                    worker.unchanged = None  # this thread has programs to start
                    self._pass_turn(worker, other)
        except _Stop:
            pass
        except BaseException as error:
            self._fail(error)

    def _starts_next(self, worker: _ProgramThread) -> bool:
        return self._starter is worker and self._next_program < self._num_programs

    def _next_runnable(self) -> _ProgramThread | None:
        return next((worker for worker in self._ready if worker.can_continue()), None)

    def _pass_turn(self, worker: _ProgramThread, other: _ProgramThread) -> None:
        saved = dict(self._state)
        self._ready.remove(other)
        self._ready.append(worker)
        other.give_turn()
        worker.await_turn(self._fail)
        self._state.update(saved)
        if self._error is not None:
            raise _Stop

    def _start_thread(self, worker: _ProgramThread) -> None:
        def work() -> None:
            worker.await_turn(self._fail)
            self._run_programs(worker)
            (self._ready.popleft() if self._ready else self._all_done).give_turn()

        # The context contains numpy's error state, which the program needs from the caller.
        thread = threading.Thread(
            target=contextvars.copy_context().run,
            args=(work,),
            name="triton_dist-program",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error


def pause(polls: int = 0, unchanged: Unchanged | None = None) -> bool:
    """Pause a wait in a program after ``polls`` earlier polls without success.

    Lets another program of the grid run and returns ``True``. If there is no other program, sleeps,
    so that copy threads and other processes can run, and returns ``False``. The sleep grows with
    ``polls`` from 200 µs to 5 ms. With more ranks than cores, frequent polls would take the core
    from the rank that should set the flag. With ``unchanged``, sleeps until it returns False.
    """
    seconds = min(MIN_PAUSE_SECONDS * (1 + polls), MAX_PAUSE_SECONDS)
    if _local.grid is not None and _local.grid.pause(seconds, unchanged):
        return True
    if unchanged is None:
        time.sleep(seconds)
        return False
    for sleep_seconds in _poll_intervals():
        if not unchanged():
            break
        time.sleep(sleep_seconds)
    return False


def _poll_intervals() -> Iterator[float]:
    """Yield the seconds to sleep between cheap polls, growing with the time waited."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield min(max(MIN_PAUSE_SECONDS, waited * _PAUSE_PER_TIME_WAITED), MAX_PAUSE_SECONDS)
