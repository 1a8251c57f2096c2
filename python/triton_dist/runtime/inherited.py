"""A value of the running thread that the threads of autograd see too.

``threading.local`` and context variables stop at the thread: on GPUs ``backward`` runs on a thread
of torch's, and what it calls would not know on whose behalf it runs. torch hands its own
thread-local state on to those threads, and keeps a place for Python objects in it.

torch drops these objects when the thread ends in the operating system, and takes the GIL for it.
``Thread.join`` may return before that. If the interpreter ends meanwhile, taking the GIL aborts the
process. So the process waits at its exit until threads that have ended in Python are gone.
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
_EXIT_SECONDS = 5.0
_holders: set[int | None] = set()
"""Native ids of the threads that have put something."""


@atexit.register
def _wait_for_ended_threads() -> None:
    """Wait until threads that put something and have ended are gone from the operating system."""
    end = time.monotonic() + _EXIT_SECONDS  # another thread may have got the id of one
    ended = _holders - {thread.native_id for thread in threading.enumerate()}
    while any(os.path.exists(f"/proc/self/task/{each}") for each in ended):
        if time.monotonic() > end:
            return
        time.sleep(0.001)  # lets go of the GIL


def in_backward() -> bool:
    """True if the running thread works on a backward pass, its own or another thread's."""
    return bool(torch._C._current_graph_task_id() != -1)


class InheritedValue:
    """``None`` in a thread that has put nothing, and works for none that has. ``name`` is unique in
    the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._slots: dict[tuple[int, _Slot | None], _Slot] = {}
        """By thread, and the slot of who it works for."""

    def get(self) -> Any:
        slot = self._slot()
        return None if slot is None else slot.get()

    def put(self, value: object) -> Any:
        """Have this thread, and those that work for it, see ``value``; ``None``: what it sees
        without one of its own. Returns what was put before, to be put again."""
        slot, this = self._slot(), threading.get_ident()
        if slot is None or slot.thread != this:
            if value is None:
                return None
            slot = self._slots.setdefault((this, slot), _Slot(this, slot))
            # torch 2.11 takes a reference without adding one, so an object that it is given is
            # freed while in use: one is added for each time, for ever.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(slot))
            _holders.add(threading.current_thread().native_id)
            _put(self._name, slot)
        before, slot.value = slot.value, value
        return before

    def _slot(self) -> _Slot | None:
        """The one of this thread, or of the one that it works for; ``None`` if neither has one."""
        slot: _Slot | None = _get(self._name) if _has(self._name) else None
        return slot


class _Slot:
    """The value of a thread, which sees that of ``outer`` while it has none."""

    def __init__(self, thread: int, outer: _Slot | None) -> None:
        self.thread, self.outer = thread, outer
        self.value: object = None

    def get(self) -> object:
        if self.value is not None or self.outer is None:
            return self.value
        return self.outer.get()
