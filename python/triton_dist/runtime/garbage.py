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
    """Return a function that calls a bound ``method`` without keeping its object alive.

    An object that stores its own bound methods is part of a reference cycle, and its memory is
    released only when the garbage collector runs.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        bound = reference()
        assert bound is not None, "its object is gone"
        return bound(*args)

    return call


class _Collection:
    """Number of active contexts that disable collection, and whether it was enabled before the
    first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collection here may call a destructor that enters it too
        self.contexts, self.was_on = 0, True


_collection = _Collection()


class no_garbage_collection:
    """Context manager that disables garbage collection; may be entered by several threads.

    Freeing garbage may call CUDA functions that are not allowed in a capture. Between launches that
    wait for each other, freeing may deadlock: torch 2.11's symmetric memory in a reference cycle
    waits for all queued work of the GPU when it is freed.
    """

    def __enter__(self) -> None:
        with _collection.lock:
            if _collection.contexts == 0:
                _collection.was_on = gc.isenabled()
                gc.disable()
            _collection.contexts += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _collection.lock:
            _collection.contexts -= 1
            if _collection.contexts == 0 and _collection.was_on:
                gc.enable()
