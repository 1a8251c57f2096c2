"""Checks that a function can be tuned, and as asked for: made where it is decorated, not at its
first call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from triton_dist._tuning.values import Config, fine_bucket
from triton_dist.errors import InvalidArgument

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CALL_KEYWORDS = ("autotune", "autotune_verbose", "autotune_pg", "autotune_allow_arg_overwrite")


def check_tunable(function: Any, decorator: str, restore: Sequence[str] = ()) -> None:
    """Refuse what calling again and again says nothing about.

    Args:
        restore: names that must be parameters of ``function``.

    Raises:
        InvalidArgument: ``function`` is no function, is a Triton kernel, a coroutine or generator
            function, or has a parameter that the tuner takes for itself.
    """

    def refuse(expected: str) -> InvalidArgument:
        return InvalidArgument(decorator, "the decorated function", function, expected)

    if hasattr(function, "fn") and hasattr(function, "arg_names"):
        raise refuse(
            "a function that launches the kernel: decorate that one, not the kernel itself, whose "
            "launch grid it is to choose"
        )
    if not callable(function) or isinstance(function, type):
        raise refuse("a function")
    called = function
    while isinstance(called, functools.partial):
        called = called.func
    if not inspect.isroutine(called):
        called = type(called).__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
        raise refuse("a function that computes when it is called, not a coroutine function")
    if inspect.isgeneratorfunction(called):
        raise refuse("a function that computes when it is called, not a generator function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin does not tell
        return
    taken = [name for name in _CALL_KEYWORDS if name in parameters]
    if taken and decorator == "autotune":
        raise refuse(f"other parameter names than {', '.join(taken)}: the tuner takes these")
    variable = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name in restore:
        if name not in parameters and not variable:
            expected = f"a parameter of the function: {', '.join(parameters)}"
            raise InvalidArgument(decorator, "restore", name, expected)


def misfit(
    function: Callable[..., Any],
    names: Set[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str:
    """Return why ``function`` cannot be called with these arguments, or with some config; empty if
    it can be.

    Args:
        names: all names that configs set.
        kwargs: the keywords of the call and the values of one config.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin does not tell
        return ""
    parameters = signature.parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        surplus = names - {each.name for each in parameters if each.kind in _BY_NAME}
        if surplus:
            return f"config_space sets {', '.join(sorted(surplus))}, which the function lacks"
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def key_of(
    function: str,
    key_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    fixed: Config,
) -> Any:
    """Return the result of ``key_fn``. It need not know the tunable names: the values that the
    caller gives for them, ``fixed``, are added.

    Raises:
        InvalidArgument: the result is not hashable.
    """
    key = key_fn(*args, **{name: kwargs[name] for name in kwargs if name not in fixed})
    try:
        hash(key)
    except TypeError as error:
        expected = "a hashable value"
        raise InvalidArgument(function, "the result of key_fn", key, expected) from error
    return (key, f"with {fixed}", fixed.digest) if fixed else key


def one_of(argument: str, value: str, choices: Sequence[str]) -> None:
    """Raises ``InvalidArgument`` for a value that is none of ``choices``."""
    if value not in choices:
        raise InvalidArgument("autotune", argument, value, " or ".join(map(repr, choices)))


def roundings(
    sizes: Sequence[str] | Mapping[str, Callable[[int], int]],
) -> dict[str, Callable[[int], int]]:
    """Names of sizes with what rounds each to the end of its range; raises ``InvalidArgument``."""
    if not isinstance(sizes, Mapping):
        return dict.fromkeys(names_of("sizes", sizes), fine_bucket)
    for name, rounding in zip(names_of("sizes", list(sizes)), sizes.values(), strict=True):
        if not callable(rounding):
            raise InvalidArgument("autotune", f"sizes[{name!r}]", rounding, "a function of a size")
    return dict(sizes)


def names_of(argument: str, names: Sequence[str]) -> tuple[str, ...]:
    """One name, or several, as a tuple; raises ``InvalidArgument`` for what is no name."""
    expected = "names of arguments or constants"
    if not isinstance(names, Iterable):
        raise InvalidArgument("autotune", argument, names, expected)
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not (isinstance(name, str) and name):
            raise InvalidArgument("autotune", argument, name, expected)
    return names
