"""One launch of an autotuned kernel, with the hooks that Triton runs around it.

Triton's own tuning runs a kernel many times in a row and undoes each run at once. Here the rest of
the function needs what the kernel did. So a run is undone at the end of the *function*, before it
is called again; what the last call did stays. Subclasses of Triton's ``Autotuner`` may have a
``run`` of their own; :class:`OwnRuns` replaces it while a call tunes.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from triton.runtime.autotuner import Autotuner

from triton_dist._tuning.engine.inputs import elements
from triton_dist._tuning.protocols import Device, Timer
from triton_dist.errors import TuningWarning

Run = Callable[..., Any]


class Leads(enum.Enum):
    """Outcomes of the ``run`` of a class."""

    TO_TRITON = enum.auto()
    TO_PRUNING = enum.auto()
    ELSEWHERE = enum.auto()


def leads(kind: Any) -> Leads:
    """By the names in the code of ``run``, and of the methods of its class that it calls."""
    runs = [(each, vars(each)["run"]) for each in kind.__mro__ if "run" in vars(each)]
    return _leads(kind, tuple(runs))


@functools.cache
def _leads(kind: Any, runs: tuple[tuple[type, Run], ...]) -> Leads:
    """``runs``: with the classes that define them, each overridden by the one before."""
    for number, (defining, run) in enumerate(runs):
        if defining is Autotuner:
            return Leads.TO_TRITON
        names = set(_names(run, kind))
        if "prune_configs" in names:
            return Leads.TO_PRUNING
        bases = {base.__name__ for base, _ in runs[number + 1 :]}
        if names and not names & ({"super"} | bases):  # what has no code may do anything
            return Leads.ELSEWHERE
    return Leads.TO_TRITON


def _names(run: Any, kind: type) -> Iterator[str]:
    left, seen = [run], set()
    while left:
        function = left.pop()
        left += filter(None, [getattr(function, "__wrapped__", None)])
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        for each in _with_inner(code):
            yield from each.co_names
            methods = (inspect.getattr_static(kind, name, None) for name in each.co_names)
            own = (each for each in methods if isinstance(each, types.FunctionType))
            left += [each for each in own if each not in vars(Autotuner).values()]


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _with_inner(constant)


def keeps_own_table(tuner: Any) -> bool:
    """True if ``cache`` of ``tuner`` is its library's, with keys that only that knows."""
    return leads(type(tuner)) is Leads.TO_PRUNING


class OwnRuns:
    """Replaces ``run`` of such classes, and puts it back.

    Args:
        replace: makes what takes the place of a class's ``run``.
    """

    def __init__(self, replace: Callable[[type[Autotuner], Run], Run]) -> None:
        self._replace = replace
        self._classes: dict[type[Autotuner], tuple[Run, Run]] = {}
        """Their own, and what takes its place."""
        self.pruning: dict[type[Autotuner], tuple[Run, Run]] = {}
        """Those whose own comes to Triton's pruning: not seen otherwise, in a settled function."""
        self._warned: set[type[Autotuner]] = set()

    def find(self) -> None:
        """Find the classes that are there now. None is replaced at that time."""
        for kind in _subclasses(Autotuner):
            own = vars(kind).get("run")
            if own is not None and self._classes.get(kind, (None,))[0] is not own:
                replacement = functools.wraps(own)(self._replace(kind, own))
                self._classes[kind] = own, replacement
        self.pruning = {
            kind: runs for kind, runs in self._classes.items() if leads(kind) is Leads.TO_PRUNING
        }

    def replace(self, only_pruning: bool = False) -> None:
        """``only_pruning``: only the classes in ``pruning``."""
        for kind, (_, replacement) in (self.pruning if only_pruning else self._classes).items():
            kind.run = replacement

    def restore(self, only_pruning: bool = False) -> None:
        for kind, (own, _) in (self.pruning if only_pruning else self._classes).items():
            kind.run = own

    def warn(self, tuner: Any) -> None:
        """Say once of each class that it is left alone."""
        kind = type(tuner)
        if kind in self._warned:
            return
        self._warned.add(kind)
        warnings.warn(
            f"contextual_autotune: {kind.__module__}.{kind.__qualname__}, such as of "
            f"{tuner.base_fn.__qualname__}, tunes in a run() of its own that comes neither to "
            "Triton's run() nor to its prune_configs(): it is left alone, and each rank chooses "
            "for itself.",
            TuningWarning,
            stacklevel=2,
        )


def _subclasses(kind: type[Autotuner]) -> Iterator[type[Autotuner]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


class Launch:
    """The launch ``tuner.run(*args, **kwargs)``, for any config.

    Args:
        undo: gets the steps that undo the launch, before the function is called again.
    """

    def __init__(
        self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], undo: ExitStack
    ) -> None:
        self._tuner, self._args, self._kwargs, self._undo = tuner, args, kwargs, undo
        self._nargs = dict(zip(tuner.arg_names, args, strict=False))

    def compile(self, config: Any) -> None:
        """Compile ``config`` and load it, with its registers and shared memory checked; launch
        nothing."""
        self._run_config_hook(config)
        options = {name: value for name, value in self._kwargs.items() if name != "warmup"}
        kernel = self._tuner.fn.warmup(*self._args, **options, **config.all_kwargs())
        if kernel is not None:  # a hook of Triton's may veto
            kernel._init_handles()

    def step(self, config: Any, device: Device, timer: Timer, timed: bool) -> Any:
        """Launch a candidate, with ``timer`` around this launch alone; if it is ``timed``, with the
        cache cold.

        Raises:
            Exception: of a hook or of the launch.
        """
        tuner, arguments = self._tuner, self._arguments(config)
        conflicts = self._kwargs.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}. Make sure that you "
                "don't re-define auto-tuned symbols."
            )
        self._run_config_hook(config)
        if tuner.user_defined_pre_hook:
            tuner.pre_hook(arguments)
        else:
            self._reset(arguments)
            self._restore_later(arguments, tuner.restore_value)
        if timed:
            device.flush_cache()
        timer.start()
        try:
            result = self._run(config)
        except Exception as error:
            if tuner.user_defined_post_hook:
                tuner.post_hook(arguments, exception=error)
            raise
        timer.stop()
        if tuner.user_defined_post_hook:
            self._undo.callback(tuner.post_hook, arguments, exception=None)
        return result

    def tuned(self, config: Any) -> Any:
        """Launch the winner of a tuning that this call of the function is part of, or ends."""
        arguments = self._arguments(config)
        self._restore_later(arguments, self._tuner.restore_value)
        if self._tuner.user_defined_pre_hook:
            self._tuner.pre_hook(arguments, reset_only=True)
        else:  # Triton's own hook cannot reset None
            self._reset(arguments)
        self._run_config_hook(config)
        return self._run(config)

    def loaded(self, config: Any) -> Any:
        """Launch a config that was known before: as in production, but it can be undone."""
        names = [*self._tuner.reset_to_zero, *self._tuner.restore_value]
        self._restore_later(self._arguments(config), names)
        self._run_config_hook(config)
        return self._run(config)

    def known(self, config: Any) -> Any:
        """Launch a config as in production."""
        self._run_config_hook(config)
        return self._run(config)

    def _run(self, config: Any) -> Any:
        self._tuner.best_config = config
        return self._tuner.fn.run(*self._args, **self._kwargs, **config.all_kwargs())

    def _arguments(self, config: Any) -> dict[str, Any]:
        return {**self._nargs, **self._kwargs, **config.all_kwargs()}

    def _run_config_hook(self, config: Any) -> None:
        if config.pre_hook is not None:
            config.pre_hook(self._arguments(config))

    def _reset(self, arguments: dict[str, Any]) -> None:
        for name in self._tuner.reset_to_zero:
            if arguments.get(name) is not None:
                arguments[name].zero_()

    def _restore_later(self, arguments: dict[str, Any], names: list[str]) -> None:
        for tensor in map(arguments.get, names):
            if tensor is not None:
                self._undo.callback(_restore, tensor, elements(tensor).clone())


def _restore(tensor: Any, copy: Any) -> None:
    elements(tensor).copy_(copy)
