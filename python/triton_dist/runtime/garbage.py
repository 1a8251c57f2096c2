"""Contexts that disable garbage collection, and weak references to methods."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def weak_method(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a bound ``method`` without keeping its object alive. An object
    that stores its own bound methods is part of a reference cycle. Its memory would be released
    only when the garbage collector runs."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        bound = reference()
        assert bound is not None, "the object of the method was freed"
        return bound(*args)

    return call


class no_garbage_collection:
    """Context manager that disables garbage collection. Several threads may enter it.

    Freeing garbage may call CUDA functions that are not allowed in a capture. Freeing symmetric
    memory of torch 2.11 waits for all queued work of the GPU. Between launches that wait for each
    other, this wait would never end.
    """

    # Reentrant: a collection while the lock is held may run a destructor that takes the lock.
    _lock = threading.RLock()
    _num_active = 0
    _was_enabled = True
    """Whether garbage collection was enabled before the first active context."""

    def __enter__(self) -> None:
        state = type(self)
        with self._lock:
            if state._num_active == 0:
                state._was_enabled = gc.isenabled()
                gc.disable()
            state._num_active += 1

    def __exit__(self, *_: object) -> None:
        state = type(self)
        with self._lock:
            state._num_active -= 1
            if state._num_active == 0 and state._was_enabled:
                gc.enable()
