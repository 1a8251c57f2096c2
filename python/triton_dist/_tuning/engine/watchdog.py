"""Ends a process that is stuck inside the user's code.

A rank that waits there for a peer that is gone (a collective, a spinning kernel launch) cannot be
interrupted from Python; its end is the only way to let the launcher, and the other ranks, go on. So
it is made a loud end: the config is quarantined, the stacks of all threads are shown, and the exit
status tells it from other deaths. The next start goes on with the tuning and skips the config.

Code that holds the interpreter's lock for ever stops the watchdog too; the other ranks then name
this one when their own time is up.

A process that was stopped (``SIGSTOP``, a suspended machine) sees the clock jump. The watchdog was
stopped too, so it notices that it comes late, and that time counts against nobody.
"""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from triton_dist.errors import WATCHDOG_EXIT_STATUS

_LOOK_SECONDS = 0.5
_LATE_SECONDS = 2.0
"""So much later than it meant to look, and the process was stopped meanwhile. A loaded machine
delays a thread by less."""
_end: Callable[[int], object] = os._exit


@dataclass(eq=False)
class Watch:
    """One stay in the user's code."""

    seconds: float
    grace: float
    report: Callable[[], Exception]
    """Called once it is overdue, on a thread of its own; what it gives is said on stderr."""
    notify_ranks: Callable[[Exception], object]
    """Called last, with the same: the other ranks may be hard to reach."""
    now: Callable[[], float] = time.monotonic
    """In seconds, without those in which the process was stopped."""
    due: float = math.inf
    overdue: bool = False
    pauses: int = 0
    """Threads, this one or those that it waits for, that are in the tuner's own code."""

    def begin(self) -> None:
        """Time runs from now. No lock: these two are called in the middle of what is timed."""
        self.due = self.now() + self.seconds

    def end(self) -> None:
        """The user's code came back."""
        self.due = math.inf

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    def next(self) -> float:
        """Time to report, or then to end the process. ``due`` is written by the watched thread,
        and those that it waits for: one that comes back at the last moment is safe from then on."""
        return self.due + self.grace if self.overdue else self.due


class OfThread(Protocol):
    """A value of the running thread."""

    def get(self) -> Any:
        """``None`` without one."""

    def put(self, value: object) -> Any:
        """Returns what was put before."""


class _Local:
    """One that no other thread sees."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def get(self) -> Any:
        return getattr(self._of_thread, "value", None)

    def put(self, value: object) -> Any:
        before, self._of_thread.value = self.get(), value
        return before


class Watchdog:
    """Watches all threads of a process from one daemon thread, which the first watch starts."""

    def __init__(self) -> None:
        self.around: OfThread = _Local()
        """Watches that a thread is in, the outermost first; where another thread waits for it,
        those of the other before them."""
        self._watches: set[Watch] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped = 0.0

    @contextmanager
    def watching(
        self,
        seconds: float,
        grace: float,
        report: Callable[[], Exception],
        notify_ranks: Callable[[Exception], object],
    ) -> Iterator[Watch]:
        """Within, between ``begin`` and ``end`` of what this gives, the user's code runs: past
        ``seconds`` call ``report``, and ``grace`` later end the process.

        ``overdue`` says afterwards whether it was reported.
        """
        watch = Watch(seconds, grace, report, notify_ranks, self._now)
        before = self.around.put((*(self.around.get() or ()), watch))
        with self._changed:
            self._watches.add(watch)
            if self._thread is None or not self._thread.is_alive():  # none yet, or in a fork
                self._thread = threading.Thread(
                    target=self._run, name="triton_dist-watchdog", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        try:
            yield watch
        finally:
            with self._changed:
                self._watches.discard(watch)
            self.around.put(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, this thread is in the tuner's own code, which bounds its waits itself: a tuned
        function that is tried calls one that is not tuned yet. Afterwards time starts anew."""
        with self._changed:
            watches: tuple[Watch, ...] = self.around.get() or ()
            running = [each for each in watches if each.pauses or each.due != math.inf]
            for watch in running:
                watch.pauses += 1
                watch.end()
        try:
            yield
        finally:
            with self._changed:
                for watch in running:
                    watch.pauses -= 1
                    if not watch.pauses:  # else another thread that it waits for is at it
                        watch.begin()

    def is_inside(self) -> bool:
        """True if this thread is inside a watch, begun or not: in what is done for a trial."""
        return bool(self.around.get())

    def forget(self) -> None:
        """In the child of a fork, which has no thread but the one that forked, and tries
        nothing."""
        self._watches = set()
        self._changed = threading.Condition()
        self._thread = None
        self.around.put(())

    def _now(self) -> float:
        return time.monotonic() - self._stopped

    def _run(self) -> None:
        while True:
            with self._changed:
                first = min(self._watches, key=Watch.next, default=None)
                left = math.inf if first is None else first.next() - self._now()
                if first is None or left > 0:
                    # A watch that begins meanwhile does not say so: it is looked at now and then.
                    seconds = None if first is None else min(left, _LOOK_SECONDS)
                    first = None  # it may hold arguments of a call
                    begin = time.monotonic()
                    self._changed.wait(seconds)
                    late = time.monotonic() - begin - (math.inf if seconds is None else seconds)
                    if late > _LATE_SECONDS:
                        self._stopped += late
                    continue
                reported, first.overdue = first.overdue, True
            if reported:
                _print(f"triton_dist: this process ends with status {WATCHDOG_EXIT_STATUS}.")
                _end(WATCHDOG_EXIT_STATUS)
                return
            # Not here: what a report does may block, and the end must come nevertheless.
            threading.Thread(target=_report, args=(first,), daemon=True).start()


def _report(watch: Watch) -> None:
    error = watch.report()
    _print(
        f"triton_dist: {error}\nThis process ends in {watch.grace:g} s if it does not "
        "come back. What it is doing:"
    )
    if sys.__stderr__ is not None:
        with suppress(Exception):  # it may be closed
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    watch.notify_ranks(error)


def _print(text: str) -> None:
    with suppress(Exception):
        print(text, file=sys.__stderr__, flush=True)


watchdog = Watchdog()
os.register_at_fork(after_in_child=watchdog.forget)
