"""One tuning at a time, without a deadlock where a tuning's own code waits for another thread."""

from __future__ import annotations

import threading
from types import TracebackType

from triton_dist._tuning.engine.watchdog import watchdog

_LOOK_SECONDS = 0.1
_PATIENCE_SECONDS = 1.0


class Gate:
    """A re-entrant lock for tunings of one group of ranks.

    A function that is tried may wait for a thread that calls another tuned function: a backward
    pass runs on threads of its own. That thread would wait for the lock, and the lock's holder for
    the thread. So who waits is let in as a guest once the code of a trial has run for a second; of
    guests, too, there is one at a time.
    """

    def __init__(self) -> None:
        self._lock, self._guests = threading.RLock(), list[Gate]()
        self._held = threading.local()

    def __enter__(self) -> None:
        held: list[Gate | None] = self._held.__dict__.setdefault("held", [])
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if watchdog.running_seconds() > _PATIENCE_SECONDS:
                if not self._guests:
                    self._guests.append(Gate())
                self._guests[0].__enter__()
                held.append(self._guests[0])
                return
        held.append(None)

    def __exit__(
        self,
        failure: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        guests = self._held.held.pop()
        if guests is None:
            self._lock.release()
        else:
            guests.__exit__(failure, error, traceback)
