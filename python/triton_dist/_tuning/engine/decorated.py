"""Base of the tuned functions of both tuners, their checks at decoration, and one-time warnings."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any

from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.values import Config, fine_bucket, original, qualified_name
from triton_dist._tuning.values.show import said
from triton_dist._warn import called_by_users, user_frame, warn_at
from triton_dist.errors import InvalidArgument, TritonDistError, TuningWarning


class Decorated:
    """A function with name, docstring and signature of ``fn``; usable as a method, pickled by name.

    Attributes:
        fn: the function itself, without tuning.
    """

    _kind = "decorated"

    def __init__(self, fn: Callable[..., Any]) -> None:
        # A partial or an object has no name of its own: it gets that of the function inside.
        named = fn if isinstance(fn, types.FunctionType) else original(fn)
        own: Any = self  # callable, as each kind of it is
        functools.update_wrapper(own, named)
        self.fn = self.__wrapped__ = fn

    @property
    def _name(self) -> str:
        """``module.qualname``."""
        return f"{original(self.fn).__module__}.{qualified_name(self.fn)}"

    def _without_object(self, args: tuple[Any, ...]) -> str:
        """Words on arguments that do not fit because ``tune`` of a bound method was called: that is
        an attribute of this object, which does not see what the method is bound to."""
        first = next(iter(inspect.signature(self.fn).parameters), "")
        name = vars(self).get("__name__", "")
        if first != "self" or not args or getattr(type(args[0]), name, None) is self:
            return ""
        return (
            f". For self it has a {type(args[0]).__name__}: tune() and best_config() of a method "
            f"are given the object too, as in {qualified_name(self.fn)}.tune(self, ...)"
        )

    # No object whose ``tune`` knows the instance: with the cheapest, a subclass of
    # functools.partial, a hit took 1.00 us instead of 0.86 (an EPYC, Python 3.11, November 2026).
    def __get__(self: Any, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        """The name under which it can be imported again.

        Its function's, unless that is a partial's or an object's: then the global that holds it.
        """
        if isinstance(inspect.unwrap(self.__wrapped__), types.FunctionType):
            return str(vars(self).get("__qualname__", ""))
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is self:
                    self.__module__ = module.__name__
                    return str(name)
        raise pickle.PicklingError(
            f"{self!r} is no global of any module, so no other process can find it by name"
        )

    def __repr__(self) -> str:
        return f"<{self._kind} {self._name}>"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CALL_KEYWORDS = ("autotune", "autotune_verbose", "autotune_pg", "autotune_allow_arg_overwrite")
"""Keywords of a call that the tuner takes for itself."""


@contextmanager
def reporting_errors(
    function: str, ranks: Callable[[], RankGroup], call: int = 0
) -> Iterator[None]:
    """Context manager that reports an exception of its block to all ranks.

    Ranks that wait for this rank in this call, or will, raise at once.
    """
    try:
        yield
    except BaseException as error:  # an interrupt too: the others must not wait for this rank
        with suppress(TritonDistError):
            about = ranks().channel(function, call=call)
            about.abort(said(error), refused=isinstance(error, Exception))
        raise


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
    taken = [name for name in CALL_KEYWORDS if name in parameters]
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


class OnceWarnings:
    """Warnings of one tuned function, which point at the user's line.

    Args:
        entry_points: what users call.
    """

    def __init__(self, entry_points: Iterable[Any]) -> None:
        called_by_users(entry_points)
        self._given: set[object] = set()

    def warn(self, text: str, about: object = None) -> None:
        """Once for what it is ``about``; without that, once for each line that calls."""
        user = user_frame()
        about = about or (user.f_code, user.f_lineno)
        if about not in self._given:
            self._given.add(about)
            warn_at(user, text, TuningWarning)
