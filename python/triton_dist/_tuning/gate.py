"""The turns that tunings of a process take."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist.runtime.inherited import InheritedValue

_held = InheritedValue("triton_dist.tuning")
"""By gate, the thread that holds it, and what watches that thread; of the running thread, or of the
one whose backward pass it works on."""


class Gate:
    """A lock that lets one thread tune at a time, and whoever that thread waits for.

    Re-entrant: a tuned function may call a tuned function. On GPUs it may do so on a thread of
    autograd, while its own thread waits in ``backward``.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._helpers = threading.RLock()
        """A backward pass has a thread for each GPU."""

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Within, no other thread tunes, but those that this one waits for."""
        this, held = threading.get_ident(), _held.get() or {}
        holder, watches = held.get(self, (this, []))
        if holder != this:
            with self._helpers, watchdog.standing_in(watches):
                yield
            return
        with self._lock:
            _held.put({**held, self: (this, watchdog.watches())})
            try:
                yield
            finally:
                _held.put(held or None)
