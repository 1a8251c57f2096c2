"""What ``@autotune`` makes of a function: a look-up, and a call.

The hot path is ``__call__``: after ``key_fn`` one dictionary look-up, no environment, log, lock,
context manager or word to other ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.engine.call_site import OnceWarnings
from triton_dist._tuning.engine.parts import Call, Hooks, Parts, Subject
from triton_dist._tuning.engine.tuner import resolve
from triton_dist._tuning.values import Config, ConfigSpace, Fingerprint, FixedSpace, TuningRecord
from triton_dist.errors import CaptureInProgress, InvalidArgument, NoValidConfig


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
        untraced: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    ) -> None:
        """``untraced`` wraps what no compiler of Python, such as ``torch.compile``, is to trace."""
        self.fn, self.config_space = fn, config_space
        self.key_fn, self.prune_fn = key_fn, prune_fn
        self.tuning_count = 0
        functools.update_wrapper(self, fn)
        self._subject = Subject(fn, function_name(fn), config_space, prune_fn, hooks)
        self._compose, self._forget = compose, forget
        self._first_call = untraced(self._call_first)
        self._chosen: dict[Any, Choice] = {}
        # Views of it for the hot path: arguments by key, of calls without and with a group.
        self._hits: dict[Any, dict[str, Any]] = {}
        self._group_hits: dict[Any, dict[Any, dict[str, Any]]] = {}
        self._names: frozenset[str] = frozenset()  # known once the space is; empty until then
        kind = type(self)
        self._warnings = OnceWarnings([kind.__call__, kind.tune, kind.best_config])

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
        if autotune and (not kwargs or self._names.isdisjoint(kwargs)):
            hits = self._hits if autotune_pg is None else self._group_hits.get(autotune_pg, {})
            try:
                arguments = hits.get(self.key_fn(*args, **kwargs))
            except Exception:  # comes again, and to all ranks, in the first call
                arguments = None
            if arguments is not None:
                return self.fn(*args, **kwargs, **arguments)
        options = (autotune, autotune_verbose, autotune_pg, autotune_allow_arg_overwrite)
        return self._first_call(args, kwargs, *options)

    def tune(
        self,
        *args: Any,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> TuningRecord:
        """Tune ahead for these arguments, or find the cached result; in the latter case the
        function is not called.

        For a method, ``Layer.forward.tune(layer, x)``.

        Raises:
            CaptureInProgress: and there is no record.
            TuningFrozen: the same while ``TRITON_DIST_AUTOTUNE_FROZEN`` is set on some rank.
        """
        fixed = self._fixed(kwargs, autotune_allow_arg_overwrite)
        record = self._choose(args, kwargs, fixed, autotune_pg, autotune_verbose).record
        if record is None:
            raise CaptureInProgress(self._subject.name)
        return record

    def best_config(
        self,
        *args: Any,
        autotune_verbose: bool = False,
        autotune_pg: Any = None,
        autotune_allow_arg_overwrite: bool = False,
        **kwargs: Any,
    ) -> Config:
        """The config that a call with these arguments uses; tunes if such a call would.

        Without the names whose values the caller gives."""
        fixed = self._fixed(kwargs, autotune_allow_arg_overwrite)
        return self._choose(args, kwargs, fixed, autotune_pg, autotune_verbose).config

    def fingerprint(self, space: ConfigSpace | None = None) -> Fingerprint:
        """What a record that is made now would depend on: hardware, versions, ranks, source.

        Args:
            space: what is left to be chosen; default: all of the config space.
        """
        space = self.config_space if space is None else space
        return self._compose(None, False).fingerprint(self.fn, space)

    def clear(self) -> None:
        """Forget what this process chose. Records on disk stay, and are looked up again."""
        self._chosen.clear()
        self._hits.clear()
        self._group_hits.clear()
        self._forget()

    def _call_first(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        autotune: bool,
        verbose: bool,
        process_group: Any,
        allow_overwrite: bool,
    ) -> Any:
        """A call that is no hit."""
        fixed = self._fixed(kwargs, allow_overwrite)
        if autotune:
            arguments = self._choose(args, kwargs, fixed, process_group, verbose).arguments
        else:
            arguments = self._default().arguments()
        return self.fn(*args, **{**arguments, **kwargs})

    def _choose(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        fixed: Config,
        process_group: Any,
        verbose: bool,
    ) -> Choice:
        """The choice for these arguments, made now if there is none. One thread at a time; the
        others find it made."""
        space: ConfigSpace = (
            self.config_space if not fixed else FixedSpace(self.config_space, fixed)
        )
        if fixed and not space.names:  # nothing is left to be chosen
            return Choice(space[0], {}, None)
        self._check_arguments(args, kwargs, self._default())
        # key_fn need not know the tunable names; what is given for them is added to the key.
        key = self._key(args, {name: kwargs[name] for name in kwargs if name not in fixed})
        if fixed and not isinstance(key, Exception):
            key = (key, f"with {fixed}", fixed.digest)
        known = None if isinstance(key, Exception) else self._chosen.get((process_group, key))
        if known is not None:
            return known
        parts = self._compose(process_group, verbose)
        with parts.gate:
            known = None if isinstance(key, Exception) else self._chosen.get((process_group, key))
            if known is not None:
                return known
            subject = dataclasses.replace(self._subject, space=space)
            resolution = resolve(subject, parts, Call(args, kwargs, key))
            config, record = resolution.config, resolution.record
            choice = Choice(config, config.arguments(), record)
            self.tuning_count += resolution.tuned
            if record is None:
                self._warn_of_default(key, parts)
                return choice
            self._chosen[process_group, key] = choice
            if not fixed:
                group = self._group_hits.setdefault(process_group, {})
                hits = self._hits if process_group is None else group
                hits[key] = choice.arguments
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

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], config: Config
    ) -> None:
        """Raises ``TypeError``, as the call would, before any other rank is spoken to."""
        try:
            signature = inspect.signature(self.fn)
        except (TypeError, ValueError):  # a builtin does not tell
            return
        try:
            signature.bind(*args, **{**config, **kwargs})
        except TypeError as error:
            raise TypeError(f"{self._subject.name}(): {error}") from None

    def _default(self) -> Config:
        if not self.config_space:
            raise NoValidConfig(self._subject.name, "(any)", {})
        config: Config = self.config_space[0]
        return config

    def _fixed(self, kwargs: dict[str, Any], allowed: bool) -> Config:
        """The keywords that are also tunable names: not to be chosen, if that is allowed."""
        self._names = self.config_space.names
        fixed = {name: value for name, value in kwargs.items() if name in self._names}
        for name, value in fixed.items():
            if not allowed:
                raise InvalidArgument(
                    self._subject.name,
                    f"keyword {name}",
                    value,
                    "no value: the tuner chooses it, unless autotune_allow_arg_overwrite=True",
                )
        if fixed:
            given = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
            self._warnings.warn(
                f"{self._subject.name}: {given} overwrites what the tuner would choose; the rest "
                "is tuned for it",
            )
        return Config(fixed)

    def _warn_of_default(self, key: Any, parts: Parts) -> None:
        if parts.ranks.is_leader:
            self._warnings.warn(
                f"{self._subject.name}, key {key}: not tuned yet, and cannot be during CUDA-graph "
                "capture; the first config is used. Call it, or its tune(), once before.",
                key,
            )

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
