"""End a process that is stuck in user code during a tuning.

User code may wait forever for a rank that has ended, in a collective or in a spinning kernel.
Python cannot interrupt such a wait. Only the end of the process lets the launcher and the other
ranks continue. The watchdog quarantines the config that is being tried, prints the stacks of all
threads, and exits with a special status. The next start resumes the tuning and skips the config.

If the user code never releases the GIL, the watchdog cannot run. The other ranks then report this
rank as missing when their own time limit ends.

After ``SIGSTOP`` or a suspend of the machine, the clock jumps. The watchdog detects this because it
wakes up late. It excludes the time of the stop from all limits.
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
from typing import Any

from triton_dist._tuning.protocols import ThreadValue
from triton_dist.errors import WATCHDOG_EXIT_STATUS

_POLL_SECONDS = 0.5
_STOPPED_DELAY_SECONDS = 2.0
"""A wake-up that is late by more than this time proves that the process was stopped. High load
delays a thread by less."""
_exit: Callable[[int], object] = os._exit


@dataclass(eq=False)
class Watch:
    """Time limit of the user code that one thread runs."""

    seconds: float
    grace_seconds: float
    """Seconds from the call of ``report`` to the end of the process."""
    report: Callable[[], Exception]
    """Called on a separate thread when the limit is exceeded. The result is printed to stderr."""
    notify_ranks: Callable[[Exception], object]
    """Called last with the result of ``report``: it may block if the other ranks do not respond."""
    now: Callable[[], float] = time.monotonic
    """Returns the time in seconds, without the time in which the process was stopped."""
    deadline: float = math.inf
    """Time (of ``now``) at which the limit is exceeded; infinite while no user code runs."""
    is_overdue: bool = False
    """The limit was exceeded."""
    num_pauses: int = 0
    """Number of threads that run code of the tuner and not user code: the watched thread, and
    threads that it waits for. While it is above 0, there is no limit."""

    def begin(self) -> None:
        """Start the time limit. No lock is taken, because this runs inside of timed code."""
        self.deadline = self.now() + self.seconds

    def end(self) -> None:
        """Stop the time limit, because user code returned."""
        self.deadline = math.inf

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *error: object) -> None:
        self.end()

    def next_deadline(self) -> float:
        """Return the time at which to report or, after the report, to end the process.

        The result is infinite if the watched thread has called ``end``.
        """
        return self.deadline + self.grace_seconds if self.is_overdue else self.deadline


class _ThreadLocalValue:
    """A value that other threads do not see."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> Any:
        return getattr(self._local, "value", None)

    def put(self, value: object) -> Any:
        """Set the value and return the previous value."""
        before, self._local.value = self.get(), value
        return before


class Watchdog:
    """Daemon thread that watches all threads of a process. The first watch starts it."""

    def __init__(self) -> None:
        self.enclosing_watches: ThreadValue = _ThreadLocalValue()
        """The watches in which the current thread is, the outermost first. If another thread waits
        for this thread, the watches of the other thread come first."""
        self._watches: set[Watch] = set()
        self._watches_changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopped_seconds = 0.0

    @contextmanager
    def watching(
        self,
        seconds: float,
        grace_seconds: float,
        report: Callable[[], Exception],
        notify_ranks: Callable[[Exception], object],
    ) -> Iterator[Watch]:
        """Context manager that limits the time of user code.

        User code runs between ``begin`` and ``end`` of the yielded watch. After ``seconds`` of user
        code, ``is_overdue`` is set and ``report`` is called. The process ends after
        ``grace_seconds`` more.
        """
        watch = Watch(seconds, grace_seconds, report, notify_ranks, self._now)
        before = self.enclosing_watches.put((*(self.enclosing_watches.get() or ()), watch))
        with self._watches_changed:
            self._watches.add(watch)
            # The thread was not started, or does not exist after a fork.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._run, name="triton_dist-watchdog", daemon=True
                )
                self._thread.start()
            self._watches_changed.notify()
        try:
            yield watch
        finally:
            with self._watches_changed:
                self._watches.discard(watch)
            self.enclosing_watches.put(before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager that pauses the watches of this thread while code of the tuner runs.

        A tuned function may call another function that is not tuned yet. At the end of the block,
        the time limits start again from zero.
        """
        with self._watches_changed:
            watches: tuple[Watch, ...] = self.enclosing_watches.get() or ()
            running = [each for each in watches if each.num_pauses or each.deadline != math.inf]
            for watch in running:
                watch.num_pauses += 1
                watch.end()
        try:
            yield
        finally:
            with self._watches_changed:
                for watch in running:
                    watch.num_pauses -= 1
                    if not watch.num_pauses:  # otherwise another thread still runs the tuner's code
                        watch.begin()

    def is_inside(self) -> bool:
        """Return whether this thread is inside a watch, and therefore inside a trial."""
        return bool(self.enclosing_watches.get())

    def reset_after_fork(self) -> None:
        """Reset the state in a forked child, which has one thread and runs no trial."""
        self._watches = set()
        self._watches_changed = threading.Condition()
        self._thread = None
        self.enclosing_watches.put(())

    def _now(self) -> float:
        return time.monotonic() - self._stopped_seconds

    def _run(self) -> None:
        while True:
            with self._watches_changed:
                next_watch = min(self._watches, key=Watch.next_deadline, default=None)
                remaining = (
                    math.inf if next_watch is None else next_watch.next_deadline() - self._now()
                )
                if next_watch is None or remaining > 0:
                    # ``begin`` of a watch does not notify this thread, so wake up regularly.
                    seconds = None if next_watch is None else min(remaining, _POLL_SECONDS)
                    next_watch = None  # it may refer to arguments of a call
                    begin = time.monotonic()
                    self._watches_changed.wait(seconds)
                    delay = time.monotonic() - begin - (math.inf if seconds is None else seconds)
                    if delay > _STOPPED_DELAY_SECONDS:
                        self._stopped_seconds += delay
                    continue
                was_reported, next_watch.is_overdue = next_watch.is_overdue, True
            if was_reported:
                _print(f"triton_dist: this process ends with status {WATCHDOG_EXIT_STATUS}.")
                _exit(WATCHDOG_EXIT_STATUS)
                return
            # Report on another thread, because a report may block and this thread must end the
            # process.
            threading.Thread(target=_report, args=(next_watch,), daemon=True).start()


def _report(watch: Watch) -> None:
    error = watch.report()
    _print(
        f"triton_dist: {error}\nThis process ends in {watch.grace_seconds:g} s unless the call "
        "returns. Stacks:"
    )
    if sys.__stderr__ is not None:
        with suppress(Exception):  # stderr may be closed
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    watch.notify_ranks(error)


def _print(text: str) -> None:
    with suppress(Exception):
        print(text, file=sys.__stderr__, flush=True)


watchdog = Watchdog()
os.register_at_fork(after_in_child=watchdog.reset_after_fork)
