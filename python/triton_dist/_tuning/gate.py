"""The turns that tunings of a process take."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from triton_dist.runtime.inherited import InheritedValue

Turns: TypeAlias = "Mapping[Gate, tuple[int, AbstractContextManager[object]]]"
_turns = InheritedValue("triton_dist.tuning")
"""``Turns`` of the running thread, and of the one whose backward pass it works on: by gate, who is
inside, and a lock for those that this one waits for."""


class Gate:
    """A lock that lets one thread tune at a time, and whoever that thread waits for.

    Re-entrant: a tuned function may call a tuned function. On GPUs it may do so on a thread of
    autograd, while its own thread waits in ``backward``. What it does not know: torch has one such
    thread for each GPU, so a backward pass of another thread, which waits for its turn there, keeps
    one that the thread inside waits for from running.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, no other thread tunes, but those that this one waits for, one after another."""
        this = threading.get_ident()
        turns: Turns = _turns.get() or {}
        inside, lock = turns.get(self, (None, self._lock))
        if inside == this:
            yield
            return
        with lock:
            before = _turns.put({**turns, self: (this, threading.RLock())})
            try:
                yield
            finally:
                _turns.put(before)
