"""Programs of one grid that may wait for one another, in one process and without a GPU.

On a GPU the resident programs of a grid make progress together, so one may spin on a flag that
another sets. Here they run in order on the calling thread, which costs nothing, until one *pauses*
in such a wait. It then keeps its thread, and a new thread goes on with the programs that were not
started yet. Exactly one program runs at any time: a turn ends when its program pauses or is over,
and the next turn goes round robin, so a run is the same every time. A program that says what it
waits for gets no turn before that has changed: looking from outside costs a microsecond, a turn a
hundred. Knows nothing of Triton.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

PAUSE_SECONDS = 200e-6
"""First pause of a waiting program when nothing else of its grid can run: about what a look costs.
Long enough for a copy thread to take the GIL and for another process to take the core."""
LONGEST_PAUSE_SECONDS = 5e-3
"""The same once it has looked in vain for a tenth of a second: always little against the time
waited."""
_SHARE_OF_WAITED = 1 / 16
"""A pause, of the time waited so far, where looking costs nothing to speak of."""

Unchanged: TypeAlias = Callable[[], bool]
"""True as long as a waiting program would find what it found when it looked last."""


class _Stop(BaseException):
    """Unwinds a paused program of a grid in which another one failed."""


class _Seat:
    """A thread's place at the table: it runs only in its turn."""

    def __init__(self) -> None:
        self._turn = False
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.unchanged: Unchanged | None = None
        """``None``: its program wants a turn, come what may."""

    def can_go_on(self) -> bool:
        return self.unchanged is None or not self.unchanged()

    def give_turn(self) -> None:
        self._turn = True
        self._signals.put(None)

    def await_turn(self, interrupted: Callable[[BaseException], None]) -> None:
        """Block until :meth:`give_turn`. What a signal handler raises meanwhile goes to
        ``interrupted``: leaving the wait without the turn would leave two programs running."""
        while not self._turn:
            try:
                self._signals.get()
            except BaseException as error:
                interrupted(error)
        self._turn = False


class _Local(threading.local):
    grid: CooperativeGrid | None = None
    seat: _Seat | None = None


_local = _Local()


class CooperativeGrid:
    """Runs ``body(0) … body(count - 1)``.

    ``state`` is a dictionary that belongs to the program that runs (the interpreter's globals):
    each program finds it after a pause as it was before. At most ``residents`` programs have begun
    and not ended at any time, as on a GPU that has room for so many; ``None``: any number.
    """

    def __init__(
        self,
        count: int,
        body: Callable[[int], None],
        state: dict[str, Any],
        residents: int | None = None,
    ) -> None:
        self._count, self._body, self._state = count, body, state
        self._residents = count if residents is None else residents
        self._next = 0
        self._front = _Seat()  # the one seat that starts programs
        self._ready: deque[_Seat] = deque()  # every seat but the one whose turn it is
        self._pauses = 0  # since a program last started or ended
        self._threads: list[threading.Thread] = []
        self._all_left = _Seat()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run all programs; the first exception of any of them ends the grid and is raised here.

        No thread is left when this returns or raises.
        """
        outer = _local.grid, _local.seat
        try:
            self._alternate(self._front)
        finally:
            _local.grid, _local.seat = outer
        if self._ready:
            self._ready.popleft().give_turn()
            self._all_left.await_turn(self._fail)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def pause(self, seconds: float, unchanged: Unchanged | None = None) -> bool:
        """End the running program's turn until ``unchanged`` no longer holds, or, without it, after
        ``seconds`` if every program waits; ``False`` if no other program of the grid could take a
        turn."""
        seat = _local.seat
        assert seat is not None, "only a program of this grid can pause it"
        if self._starts_next(seat) and 1 + len(self._ready) < self._residents:
            self._front = _Seat()
            self._start_thread(self._front)
            self._ready.appendleft(self._front)
        if not self._ready:
            return False
        seat.unchanged = unchanged
        if unchanged is None:
            self._pauses += 1
            if self._pauses > len(self._ready):  # all wait, for something outside this grid
                self._pauses = 0
                time.sleep(seconds)
        for nap in _naps():
            if self._error is not None:
                raise _Stop
            if (other := self._next_to_go()) is not None:
                self._pass_turn(seat, other)
                break
            if seat.can_go_on():
                break
            time.sleep(nap)
        return True

    def _alternate(self, seat: _Seat) -> None:
        """Start programs, in order, until another seat does because this one's program paused."""
        _local.grid, _local.seat = self, seat
        try:
            while self._starts_next(seat) and self._error is None:
                program, self._next = self._next, self._next + 1
                self._pauses = 0
                self._body(program)
                self._pauses = 0
                if self._starts_next(seat) and (other := self._next_to_go()) is not None:
                    seat.unchanged = None  # it has programs to start
                    self._pass_turn(seat, other)
        except _Stop:
            pass
        except BaseException as error:
            self._fail(error)

    def _starts_next(self, seat: _Seat) -> bool:
        return self._front is seat and self._next < self._count

    def _next_to_go(self) -> _Seat | None:
        return next((seat for seat in self._ready if seat.can_go_on()), None)

    def _pass_turn(self, seat: _Seat, other: _Seat) -> None:
        saved = dict(self._state)
        self._ready.remove(other)
        self._ready.append(seat)
        other.give_turn()
        seat.await_turn(self._fail)
        self._state.update(saved)
        if self._error is not None:
            raise _Stop

    def _start_thread(self, seat: _Seat) -> None:
        def work() -> None:
            seat.await_turn(self._fail)
            self._alternate(seat)
            (self._ready.popleft() if self._ready else self._all_left).give_turn()

        # The context carries numpy's error state, which a kernel inherits from its launcher.
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


def pause(looks: int = 0, unchanged: Unchanged | None = None) -> bool:
    """Called by a blocked wait on each round, after ``looks`` earlier ones in vain.

    Lets another program of the grid run and returns ``True``; where there is none, sleeps, so that
    copy threads and other processes get on, and returns ``False``. The sleep grows with ``looks``
    from 200 µs to 5 ms: a look costs as much as the first sleep, and with more ranks than cores,
    polling takes the core away from the very rank that is waited for. With ``unchanged`` it returns
    when that no longer holds.
    """
    seconds = min(PAUSE_SECONDS * (1 + looks), LONGEST_PAUSE_SECONDS)
    if _local.grid is not None and _local.grid.pause(seconds, unchanged):
        return True
    if unchanged is None:
        time.sleep(seconds)
        return False
    for nap in _naps():
        if not unchanged():
            break
        time.sleep(nap)
    return False


def _naps() -> Iterator[float]:
    """Seconds to sleep between looks that cost nothing, more with the time that has gone by."""
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield min(max(PAUSE_SECONDS, waited * _SHARE_OF_WAITED), LONGEST_PAUSE_SECONDS)
