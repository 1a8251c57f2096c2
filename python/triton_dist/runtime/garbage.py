"""Contexts that disable garbage collection, and weak references to methods."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
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


class _CollectionState:
    """Number of active ``no_garbage_collection`` contexts, and whether garbage collection was
    enabled before the first of them."""

    def __init__(self) -> None:
        # Reentrant: a collection while the lock is held may run a destructor that takes the lock.
        self.lock = threading.RLock()
        self.num_contexts, self.was_enabled = 0, True


_state = _CollectionState()


class no_garbage_collection:
    """Context manager that disables garbage collection. Several threads may enter it.

    Freeing garbage may call CUDA functions that are not allowed in a capture. Freeing symmetric
    memory of torch 2.11 waits for all queued work of the GPU. Between launches that wait for each
    other, this wait would never end.
    """

    def __enter__(self) -> None:
        with _state.lock:
            if _state.num_contexts == 0:
                _state.was_enabled = gc.isenabled()
                gc.disable()
            _state.num_contexts += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _state.lock:
            _state.num_contexts -= 1
            if _state.num_contexts == 0 and _state.was_enabled:
                gc.enable()
