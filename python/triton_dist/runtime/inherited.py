"""A value of the running thread that the threads of autograd see too.

``threading.local`` and context variables stop at the thread: on GPUs ``backward`` runs on a thread
of torch's, and what it calls would not know on whose behalf it runs. torch hands its own
thread-local state on to those threads, and keeps a place for Python objects in it.
"""

from __future__ import annotations

from typing import Any

import torch

_get = torch._C._get_obj_in_tls
_put = torch._C._stash_obj_in_tls


def in_backward() -> bool:
    """Whether the running thread works on a backward pass, its own or another thread's."""
    return bool(torch._C._current_graph_task_id() != -1)


class InheritedValue:
    """``None`` in a thread that has put nothing. ``name`` is unique in the process."""

    def __init__(self, name: str) -> None:
        self._name = name

    def get(self) -> Any:
        try:
            return _get(self._name)
        except RuntimeError:  # nothing was put in this thread yet: the next look is cheap
            _put(self._name, None)
            return None

    def put(self, value: object) -> None:
        _put(self._name, value)
