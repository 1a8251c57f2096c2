"""Check the arguments of the decorators, and the functions that they decorate."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from triton_dist._tuning.engine.decorated import CALL_KEYWORDS
from triton_dist._tuning.values import fine_bucket
from triton_dist.errors import InvalidArgument


def check_tunable(function: Any, decorator: str, restore: Sequence[str] = ()) -> None:
    """Raise ``InvalidArgument`` for objects that cannot be tuned by calling them repeatedly.

    Args:
        decorator: name of the decorator, for messages.
        restore: names that must be parameters of ``function``.

    Raises:
        InvalidArgument: ``function`` is not a function; or it is a Triton kernel, a coroutine
            function or a generator function; or it has a parameter name that the tuner uses.
    """

    def refusal(expected: str) -> InvalidArgument:
        return InvalidArgument(decorator, "the decorated function", function, expected)

    if hasattr(function, "fn") and hasattr(function, "arg_names"):
        raise refusal(
            "a function that launches the kernel: decorate this function, because the config may "
            "also select the launch grid"
        )
    if not callable(function) or isinstance(function, type):
        raise refusal("a function")
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise refusal("a function that computes when it is called, not a coroutine function")
    if inspect.isgeneratorfunction(called):
        raise refusal("a function that computes when it is called, not a generator function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return
    reserved = [name for name in CALL_KEYWORDS if name in parameters]
    if reserved and decorator == "autotune":
        raise refusal(f"parameter names other than {', '.join(reserved)}: the tuner uses these")
    accepts_any_keyword = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in restore:
        if name not in parameters and not accepts_any_keyword:
            expected = f"a parameter of the function: {', '.join(parameters)}"
            raise InvalidArgument(decorator, "restore", name, expected)


def check_choice(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raise ``InvalidArgument`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise InvalidArgument("autotune", argument, value, " or ".join(map(repr, choices)))


def rounding_functions(
    sizes: Sequence[str] | Mapping[str, Callable[[int], int]],
) -> dict[str, Callable[[int], int]]:
    """Return, by name of a size, the function that rounds it up to the end of its range.

    ``sizes`` are names, which use :func:`fine_bucket`, or a map from name to function.
    """
    if not isinstance(sizes, Mapping):
        return dict.fromkeys(tuple_of_names("sizes", sizes), fine_bucket)
    for name, rounding in zip(tuple_of_names("sizes", list(sizes)), sizes.values(), strict=True):
        if not callable(rounding):
            raise InvalidArgument("autotune", f"sizes[{name!r}]", rounding, "a function of a size")
    return dict(sizes)


def tuple_of_names(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return ``names``, a name or several names, as a tuple. Raise ``InvalidArgument`` for other
    values."""
    expected = "names of arguments or constants"
    if not isinstance(names, Iterable):
        raise InvalidArgument("autotune", argument, names, expected)
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not (isinstance(name, str) and name):
            raise InvalidArgument("autotune", argument, name, expected)
    return names
