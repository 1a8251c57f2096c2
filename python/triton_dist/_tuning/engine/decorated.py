"""What a tuner's decorator can be put on."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton.runtime.jit import KernelInterface

from triton_dist.errors import InvalidArgument


def check_function(decorator: str, fn: Any) -> None:
    """Raise ``InvalidArgument`` unless calling ``fn`` computes its result.

    A kernel is launched and not called; a coroutine or generator function has done nothing yet when
    it returns, so that there is nothing to be timed.
    """
    if isinstance(fn, KernelInterface):
        expected = "a function that launches it: put the decorator on that"
        raise InvalidArgument(decorator, "the decorated object", fn, expected)
    if not callable(fn):
        raise InvalidArgument(decorator, "the decorated object", fn, "a function")
    function = fn
    while isinstance(function, functools.partial):
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = function.__call__
    function = inspect.unwrap(function)
    for kind, found in (
        ("coroutine", inspect.iscoroutinefunction(function)),
        ("generator", inspect.isgeneratorfunction(function)),
        ("asynchronous generator", inspect.isasyncgenfunction(function)),
    ):
        if found:
            expected = (
                f"a function that has computed its result when it returns; this {kind} function "
                "has not begun then. Put the decorator on what it calls"
            )
            raise InvalidArgument(decorator, "the decorated object", fn, expected)
