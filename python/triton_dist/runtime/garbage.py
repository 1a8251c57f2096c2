"""Blocks without garbage collection, and methods that leave nothing for it to collect."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


def weak(method: Callable[..., T]) -> Callable[..., T]:
    """Return a function that calls a bound ``method`` and does not keep its object alive.

    An object that hands out its own methods otherwise lies in a cycle, and its memory is returned
    only when the collector runs.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> T:
        bound = reference()
        assert bound is not None, "its object is gone"
        return bound(*args)

    return call


class _Collection:
    """Blocks that forbid collecting now, and whether it was on before the first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a collection in here may free what enters such a block
        self.forbidden, self.was_on = 0, True


_collection = _Collection()


class uncollected:
    """Context in which no garbage is collected, in however many threads it is entered.

    What freeing some of it asks of the driver, a capture forbids, and between launches that wait
    for one another it never ends: symmetric memory of torch 2.11 that lies in a cycle waits for
    all that the GPU has to do.
    """

    def __enter__(self) -> None:
        with _collection.lock:
            if _collection.forbidden == 0:
                _collection.was_on = gc.isenabled()
                gc.disable()
            _collection.forbidden += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _collection.lock:
            _collection.forbidden -= 1
            if _collection.forbidden == 0 and _collection.was_on:
                gc.enable()
