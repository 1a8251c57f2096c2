"""Thread-local values that autograd's threads inherit from the thread that calls ``backward``.

On GPUs, torch runs ``backward`` on its own threads. They do not see the caller's
``threading.local`` and context variables. torch copies its own thread-local state to these threads,
and this state can contain Python objects.

When the operating system ends a thread, torch takes the GIL to drop these objects. ``Thread.join``
may return earlier. If the interpreter exits before torch takes the GIL, the process aborts.
Therefore the process waits at exit until threads that have ended in Python are gone.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from typing import Any

import torch

_has = torch._C._is_key_in_tls
_get = torch._C._get_obj_in_tls
_put = torch._C._stash_obj_in_tls
_THREAD_EXIT_SECONDS = 5.0
_native_ids: set[int | None] = set()
"""Native ids of the threads that have put a value."""


@atexit.register
def _wait_for_ended_threads() -> None:
    """Wait until ended threads that put a value are gone from the operating system."""
    # A new thread may have reused the id of an ended thread.
    end = time.monotonic() + _THREAD_EXIT_SECONDS
    ended = _native_ids - {thread.native_id for thread in threading.enumerate()}
    while any(os.path.exists(f"/proc/self/task/{each}") for each in ended):
        if time.monotonic() > end:
            return
        time.sleep(0.001)  # releases the GIL


def in_backward() -> bool:
    """Return True if this thread executes a backward pass, even if another thread started it."""
    return bool(torch._C._current_graph_task_id() != -1)


class InheritedValue:
    """A value for each thread, which autograd's threads inherit. The default is ``None``. ``name``
    must be unique in the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._slots: dict[tuple[int, _Slot | None], _Slot] = {}
        """Slots by thread id and by the slot that the thread inherited."""

    def get(self) -> Any:
        slot = self._slot()
        return None if slot is None else slot.get()

    def put(self, value: object) -> Any:
        """Set ``value`` for this thread and for threads that inherit from it. ``None`` restores the
        inherited value. Returns the previous value, so that callers can restore it."""
        slot, this = self._slot(), threading.get_ident()
        if slot is None or slot.thread != this:
            if value is None:
                return None
            slot = self._slots.setdefault((this, slot), _Slot(this, slot))
            # torch 2.11 stores a reference without incrementing the object's reference count, so
            # the object would be freed while in use. Increment the count, and never decrement it.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(slot))
            _native_ids.add(threading.current_thread().native_id)
            _put(self._name, slot)
        previous, slot.value = slot.value, value
        return previous

    def _slot(self) -> _Slot | None:
        """Return the slot of this thread, or the inherited slot, or ``None``."""
        slot: _Slot | None = _get(self._name) if _has(self._name) else None
        return slot


class _Slot:
    """The value of a thread. While its value is ``None``, the value of ``outer`` is used."""

    def __init__(self, thread: int, outer: _Slot | None) -> None:
        self.thread, self.outer = thread, outer
        self.value: object = None

    def get(self) -> object:
        if self.value is not None or self.outer is None:
            return self.value
        return self.outer.get()
