"""Define types of ``@autotune``, so that type checkers can check calls of decorated functions.

Type annotations cannot express "the parameters of the function without the tunable parameters".
Instead, the parameters of ``key_fn`` are used: ``key_fn`` receives every argument of a call except
the tunable arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from triton_dist._tuning.engine.dispatch import AutoTuner

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
K_co = TypeVar("K_co", bound=Callable[..., object], covariant=True)


class _AnyArguments(Protocol[P]):
    """Type that only functions with ``*args`` and ``**kwargs`` match."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> object: ...
    # No other function accepts eight positional arguments and this keyword.
    @overload
    def __call__(
        self, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, /, *, _: Any
    ) -> object: ...


class _WithDefaults(Protocol[P, Q, R_co]):
    """Function that can be called with and without its tunable parameters: they have defaults."""

    # A call with tunables: ``P`` are all parameters of the function.
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    # A call without tunables: ``Q`` are the parameters of ``key_fn``.
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> object: ...


class AutoTunerByKey(AutoTuner[P, R_co]):
    """Tuned function whose calls must match ``P``, here the parameters of its ``key_fn``."""

    fn: Callable[..., R_co]


class Decorator(Protocol[K_co]):
    """The decorator that ``autotune`` returns for a ``key_fn`` of type ``K_co``.

    A type checker uses the first overload that matches.
    """

    # ``key_fn`` has ``*args`` and ``**kwargs``: calls accept any arguments too.
    @overload
    def __call__(
        self: Decorator[_AnyArguments[Q]], fn: Callable[..., R], /
    ) -> AutoTunerByKey[Q, R]: ...
    # All tunable parameters have defaults: calls may pass any parameter of the function.
    @overload
    def __call__(
        self: Decorator[Callable[Q, object]], fn: _WithDefaults[P, Q, R], /
    ) -> AutoTuner[P, R]: ...
    # Some tunable parameter has no default: calls pass the parameters of ``key_fn``.
    @overload
    def __call__(
        self: Decorator[Callable[Q, object]], fn: Callable[..., R], /
    ) -> AutoTunerByKey[Q, R]: ...
