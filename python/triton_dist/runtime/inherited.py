"""A value of the running thread that the threads of autograd see too.

``threading.local`` and context variables stop at the thread: on GPUs ``backward`` runs on a thread
of torch's, and what it calls would not know on whose behalf it runs. torch hands its own
thread-local state on to those threads, and keeps a place for Python objects in it.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

_has = torch._C._is_key_in_tls
_get = torch._C._get_obj_in_tls
_put = torch._C._stash_obj_in_tls


def in_backward() -> bool:
    """True if the running thread works on a backward pass, its own or another thread's."""
    return bool(torch._C._current_graph_task_id() != -1)


class InheritedValue:
    """``None`` in a thread that has put nothing, and works for none that has. ``name`` is unique in
    the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kept: list[_Slot] = []

    def get(self) -> Any:
        slot = self._slot()
        return None if slot is None else slot.get()

    def put(self, value: object) -> None:
        slot = self._slot()
        if slot is None:
            if value is None:
                return
            slot = _Slot()
            # Kept for ever, and once more: torch 2.11 takes a reference without adding one, so an
            # object that it is given is freed while in use.
            self._kept += [slot, slot]
            _put(self._name, slot)
        slot.put(value)

    def _slot(self) -> _Slot | None:
        """The value of this thread, or of the one that it works for; ``None`` if neither has put
        any yet."""
        slot: _Slot | None = _get(self._name) if _has(self._name) else None
        return slot


class _Slot:
    """Values that a thread has put, and that threads which work for it have put meanwhile."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self._values: dict[int, object] = {}

    def get(self) -> object:
        own = self._values.get(threading.get_ident())
        return self._values.get(self._owner) if own is None else own

    def put(self, value: object) -> None:
        if value is None:
            self._values.pop(threading.get_ident(), None)
        else:
            self._values[threading.get_ident()] = value
