"""A tuned function, of either tuner: to its users it stays the function."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

from triton_dist._tuning.values import original, qualified_name


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
