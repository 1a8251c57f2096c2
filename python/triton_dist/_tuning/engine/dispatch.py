"""What ``@autotune`` makes of a function: a look-up, and a call.

The hot path is ``__call__``: after ``key_fn`` one dictionary look-up, no environment, log, lock,
context manager or word to other ranks.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.engine.parts import Call, Hooks, Parts, Subject
from triton_dist._tuning.engine.tuner import resolve
from triton_dist._tuning.values import Config, ConfigSpace, TuningRecord
from triton_dist.errors import CaptureInProgress, InvalidArgument, NoValidConfig, TuningWarning


@dataclass(frozen=True)
class Choice:
    """What was chosen for a key."""

    config: Config
    arguments: dict[str, Any]
    """Of the config, ready for a call."""
    record: TuningRecord | None


class AutoTuner:
    """A function whose tunable arguments are chosen by measuring, once for each key.

    To its users it stays the function: name, docstring, signature, use as a method, pickling by
    name.

    Attributes:
        fn: the function itself, without tuning.
        config_space: the candidates, evaluated when first looked at.
        key_fn, prune_fn: as given.
        tuning_count: how many tunings this process did; a cached result is none.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        config_space: ConfigSpace,
        key_fn: Callable[..., Any],
        prune_fn: Callable[..., object] | None,
        hooks: Hooks,
        compose: Callable[[Any, bool], Parts],
        forget: Callable[[], None],
    ) -> None:
        self.fn, self.config_space = fn, config_space
        self.key_fn, self.prune_fn = key_fn, prune_fn
        self.tuning_count = 0
        functools.update_wrapper(self, fn)
        self._subject = Subject(fn, function_name(fn), config_space, prune_fn, hooks)
        self._compose, self._forget = compose, forget
        self._chosen: dict[tuple[Any, Any], Choice] = {}
        self._names: frozenset[str] = frozenset()  # known once the space is; empty until then

    def __call__(
        self,
        *args: Any,
        autotune: bool = True,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call the function with the config of this key; tunes at the first call of a key."""
        if autotune and self._names.isdisjoint(kwargs):
            try:
                choice = self._chosen.get((autotune_pg, self.key_fn(*args, **kwargs)))
            except Exception:  # comes again, and to all ranks, in the first call
                choice = None
            if choice is not None:
                return self.fn(*args, **kwargs, **choice.arguments)
        overwritten = self._overwritten(kwargs, autotune_allow_arg_overwrite)
        kept = {name: value for name, value in kwargs.items() if name not in overwritten}
        if not autotune or (overwritten and overwritten.keys() == self._names):
            arguments = self._default().arguments()  # nothing is left to be chosen
        else:
            arguments = self._choose(args, kept, autotune_pg, autotune_verbose).arguments
        return self.fn(*args, **{**arguments, **kwargs})

    def tune(
        self, *args: Any, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> TuningRecord:
        """Tune ahead for these arguments, or find the cached result. Calls nothing in the latter
        case.

        Raises:
            CaptureInProgress: and there is no record.
        """
        record = self._choose(args, kwargs, autotune_pg, autotune_verbose).record
        if record is None:
            raise CaptureInProgress(self._subject.name)
        return record

    def best_config(
        self, *args: Any, autotune_verbose: bool = False, autotune_pg: Any = None, **kwargs: Any
    ) -> Config:
        """The config that a call with these arguments uses; tunes if such a call would."""
        return self._choose(args, kwargs, autotune_pg, autotune_verbose).config

    def clear(self) -> None:
        """Forget what this process chose. Records on disk stay, and are looked up again."""
        self._chosen.clear()
        self._forget()

    def _choose(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], process_group: Any, verbose: bool
    ) -> Choice:
        """The choice for these arguments, made now if there is none. One thread at a time; the
        others find it made."""
        self._check_arguments(args, kwargs)
        key = self._key(args, kwargs)
        parts = self._compose(process_group, verbose)
        with parts.gate:
            known = None if isinstance(key, Exception) else self._chosen.get((process_group, key))
            if known is not None:
                return known
            resolution = resolve(self._subject, parts, Call(args, kwargs, key))
            config, record = resolution.config, resolution.record
            choice = Choice(config, config.arguments(), record)
            if record is not None:
                self._chosen[process_group, key] = choice
            self.tuning_count += resolution.tuned
            return choice

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``key_fn`` returns, or the exception that all ranks are to learn of."""
        try:
            key = self.key_fn(*args, **kwargs)
        except Exception as error:
            return error
        try:
            hash(key)
        except TypeError:
            return InvalidArgument(
                self._subject.name, "the result of key_fn", key, "a hashable value"
            )
        return key

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ``TypeError``, as the call would, before any other rank is spoken to."""
        default = self._default()
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):  # a builtin does not tell
            return
        try:
            signature.bind(*args, **kwargs, **default)
        except TypeError as error:
            raise TypeError(f"{self._subject.name}(): {error}") from None

    def _default(self) -> Config:
        self._names = self.config_space.names
        if not self.config_space:
            raise NoValidConfig(self._subject.name, "(any)", {})
        config: Config = self.config_space[0]
        return config

    def _overwritten(self, kwargs: dict[str, Any], allowed: bool) -> dict[str, Any]:
        """The keywords that are also tunable names."""
        self._names = self.config_space.names
        overwritten = {name: value for name, value in kwargs.items() if name in self._names}
        for name, value in overwritten.items():
            if not allowed:
                raise InvalidArgument(
                    self._subject.name,
                    f"keyword {name}",
                    value,
                    "no value: the tuner chooses it, unless autotune_allow_arg_overwrite=True",
                )
            warnings.warn(
                f"{self._subject.name}: {name}={value!r} overwrites what the tuner chose",
                TuningWarning,
                stacklevel=3,
            )
        return overwritten

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str:
        return str(vars(self)["__qualname__"])  # pickled by name, as functions are

    def __repr__(self) -> str:
        return f"<autotuned {self._subject.name}>"


def function_name(function: Callable[..., Any]) -> str:
    """``module.qualname``."""
    named = inspect.unwrap(function)
    return f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"
