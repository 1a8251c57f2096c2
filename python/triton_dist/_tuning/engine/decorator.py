"""Types of ``@autotune`` for type checkers: which calls of the decorated function are valid.

A type checker cannot remove the tunable parameters from a function's parameters, but it knows the
parameters of ``key_fn``, which receives every argument of a call except the tunable ones.
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
    """A function with ``*args`` and ``**kwargs``: it accepts any number of arguments and names."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> object: ...
    # Only a function with ``*args`` and ``**kwargs`` also accepts these eight positional arguments
    # and this keyword.
    @overload
    def __call__(
        self, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, /, *, _: Any
    ) -> object: ...


class _WithDefaults(Protocol[P, Q, R_co]):
    """A function that can also be called with the arguments ``Q``: its tunables have defaults."""

    # A call with tunables: ``P`` are all parameters of the function.
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    # A call without tunables: ``Q`` are the parameters of ``key_fn``.
    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> object: ...


class AutoTunerByKey(AutoTuner[P, R_co]):
    """A tuned function whose calls must match ``P``, the parameters of its ``key_fn``."""

    fn: Callable[..., R_co]


class Decorator(Protocol[K_co]):
    """What ``autotune`` returns for a ``key_fn`` of type ``K_co``.

    A type checker uses the first overload that matches.
    """

    # ``key_fn`` accepts any arguments, so it reveals nothing: calls accept any arguments too.
    @overload
    def __call__(
        self: Decorator[_AnyArguments[Q]], fn: Callable[..., R], /
    ) -> AutoTunerByKey[Q, R]: ...
    # All tunables have defaults: calls may pass any parameter of the function.
    @overload
    def __call__(
        self: Decorator[Callable[Q, object]], fn: _WithDefaults[P, Q, R], /
    ) -> AutoTuner[P, R]: ...
    # Some tunable has no default: calls pass the parameters of ``key_fn``.
    @overload
    def __call__(
        self: Decorator[Callable[Q, object]], fn: Callable[..., R], /
    ) -> AutoTunerByKey[Q, R]: ...
