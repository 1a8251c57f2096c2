"""Define the base class of the objects that both tuning decorators of the package return."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, Generic, ParamSpec, TypeVar

from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.values import Config, original, qualified_name
from triton_dist._tuning.values.show import error_text
from triton_dist._warn import register_entry_points, user_frame, warn_at
from triton_dist.errors import InvalidArgument, TritonDistError, TuningWarning

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Decorated(Generic[P, R_co]):
    """Callable with the name, docstring and signature of the function ``fn``.

    It can be used as a method. It is pickled by name. ``fn`` is the function without tuning.
    """

    _description = "decorated"

    def __init__(self, fn: Callable[..., R_co]) -> None:
        # A partial or a callable object has no name. Use the name of the function inside.
        named = fn if isinstance(fn, types.FunctionType) else original(fn)
        this: Any = self  # all subclasses are callable
        functools.update_wrapper(this, named)
        self.fn = self.__wrapped__ = fn

    @property
    def _name(self) -> str:
        return f"{original(self.fn).__module__}.{qualified_name(self.fn)}"

    def _hint_for_method(self, args: tuple[Any, ...]) -> str:
        """Return a hint if ``args`` are wrong because ``tune`` was called on a bound method.

        In ``layer.forward.tune(x)``, ``tune`` is an attribute of the tuned function and does not
        receive ``layer``. Return an empty text if this is not the cause.
        """
        first = next(iter(inspect.signature(self.fn).parameters), "")
        name = vars(self).get("__name__", "")
        if first != "self" or not args or getattr(type(args[0]), name, None) is self:
            return ""
        return (
            f". For self it received a value of type {type(args[0]).__name__}. Pass the object "
            f"to tune() and best_config() of a method: {qualified_name(self.fn)}.tune(self, ...)"
        )

    # An object whose ``tune`` receives the instance would make each call slower: with the fastest
    # version, a subclass of functools.partial, a call with a cached key took 1.00 us instead of
    # 0.86 us (EPYC CPU, Python 3.11, November 2026).
    def __get__(self: Any, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        """Return the name under which this object can be imported: the name of the function, or of
        the global variable that has this object as value."""
        if isinstance(inspect.unwrap(self.__wrapped__), types.FunctionType):
            return str(vars(self).get("__qualname__", ""))
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is self:
                    self.__module__ = module.__name__
                    return str(name)
        raise pickle.PicklingError(
            f"{self!r} is not a global of any module, so other processes cannot import it"
        )

    def __repr__(self) -> str:
        return f"<{self._description} {self._name}>"


_KEYWORD_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
CALL_KEYWORDS = ("autotune", "autotune_verbose", "autotune_pg", "autotune_allow_arg_overwrite")
"""Keywords of a call that the tuner uses and does not pass to the function."""


@contextmanager
def reporting_errors(
    function: str, ranks: Callable[[], RankGroup], call: int = 0
) -> Iterator[None]:
    """Context manager that reports an exception raised inside it to all ranks.

    Ranks that wait for this rank in call number ``call``, now or later, raise immediately.
    """
    try:
        yield
    except BaseException as error:  # KeyboardInterrupt too: release the other ranks
        with suppress(TritonDistError):
            channel = ranks().channel(function, call=call)
            channel.abort(error_text(error), refused=isinstance(error, Exception))
        raise


def signature_error(
    function: Callable[..., Any], names: Set[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """Return why ``function`` cannot be called with these arguments; empty if it can.

    ``names`` are the arguments that configs set. ``kwargs`` includes the values of one config.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return ""
    parameters = signature.parameters.values()
    if not any(each.kind is each.VAR_KEYWORD for each in parameters):
        surplus = names - {each.name for each in parameters if each.kind in _KEYWORD_KINDS}
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
    """Return the key of a call: the result of ``key_fn``, and ``fixed`` if it is not empty.

    ``fixed`` has the tunable arguments that the caller sets. ``key_fn`` does not receive them.
    """
    key = key_fn(*args, **{name: kwargs[name] for name in kwargs if name not in fixed})
    try:
        hash(key)
    except TypeError as error:
        raise InvalidArgument(function, "the result of key_fn", key, "a hashable value") from error
    return (key, f"with {fixed}", fixed.digest) if fixed else key


class WarnOnce:
    """Warnings of one tuned function. They point at the user's line that called an entry point."""

    def __init__(self, entry_points: Iterable[Any]) -> None:
        register_entry_points(entry_points)
        self._issued: set[object] = set()

    def warn(self, text: str, topic: object = None) -> None:
        """Warn once per value of ``topic``. Without ``topic``, warn once per calling line."""
        frame = user_frame()
        topic = topic or (frame.f_code, frame.f_lineno)
        if topic not in self._issued:
            self._issued.add(topic)
            warn_at(frame, text, TuningWarning)
