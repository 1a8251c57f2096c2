"""Launch a kernel once inside a function that ``contextual_autotune`` tunes, with Triton's hooks.

Triton's own tuning runs a kernel many times in a row, and restores changed buffers after each run.
``contextual_autotune`` calls the decorated function repeatedly, and the rest of the function needs
the result of the kernel. So buffers are restored at the end of the *function*, before the next
call. They are not restored after the last call. Subclasses of Triton's ``Autotuner`` may override
``run``; :class:`OverriddenRuns` replaces their ``run`` during a tuning.
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

from triton_dist._tuning.engine.inputs import without_expanded_dimensions
from triton_dist._tuning.protocols import Device, Timer
from triton_dist._tuning.values.codec import nested_code
from triton_dist.errors import TuningWarning

Run = Callable[..., Any]


class RunTarget(enum.Enum):
    """Which method of Triton's ``Autotuner`` the ``run`` of a subclass calls."""

    TRITON_RUN = enum.auto()
    PRUNE_CONFIGS = enum.auto()
    NEITHER = enum.auto()


def run_target(autotuner_class: Any) -> RunTarget:
    """Return which method the ``run`` of a class calls, found by the names in its code."""
    runs = [(each, vars(each)["run"]) for each in autotuner_class.__mro__ if "run" in vars(each)]
    return _run_target(autotuner_class, tuple(runs))


@functools.cache
def _run_target(autotuner_class: Any, runs: tuple[tuple[type, Run], ...]) -> RunTarget:
    """Return the result of :func:`run_target`, given the ``run`` of each class in method resolution
    order."""
    for number, (defining, run) in enumerate(runs):
        if defining is Autotuner:
            return RunTarget.TRITON_RUN
        names = set(_names(run, autotuner_class))
        if "prune_configs" in names:
            return RunTarget.PRUNE_CONFIGS
        bases = {base.__name__ for base, _ in runs[number + 1 :]}
        if names and not names & ({"super"} | bases):
            return RunTarget.NEITHER  # without names (a builtin), it may call a base class
    return RunTarget.TRITON_RUN


def _names(run: Any, autotuner_class: type) -> Iterator[str]:
    """Yield the names in the code of ``run``, and of the methods of its class that it calls."""
    pending, seen = [run], set()
    while pending:
        function = pending.pop()
        pending += filter(None, [getattr(function, "__wrapped__", None)])
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        for _, each in nested_code(code):
            yield from each.co_names
            names = each.co_names
            methods = (inspect.getattr_static(autotuner_class, name, None) for name in names)
            functions = (each for each in methods if isinstance(each, types.FunctionType))
            pending += [each for each in functions if each not in vars(Autotuner).values()]


def has_own_cache(autotuner: Any) -> bool:
    """Return whether the class of ``autotuner`` stores configs under its own keys."""
    return run_target(type(autotuner)) is RunTarget.PRUNE_CONFIGS


class OverriddenRuns:
    """The subclasses of ``Autotuner`` that override ``run``.

    ``replace(autotuner_class, run)`` returns a new ``run``.
    """

    def __init__(self, replace: Callable[[type[Autotuner], Run], Run]) -> None:
        self._replace = replace
        self._classes: dict[type[Autotuner], tuple[Run, Run]] = {}
        """By class: its original ``run`` and the replacement."""
        self.prune_callers: dict[type[Autotuner], tuple[Run, Run]] = {}
        """The classes whose ``run`` calls ``prune_configs``. While a function runs whose kernels
        are all tuned, only their ``run`` is replaced. New keys of other classes are detected by a
        replacement of ``prune_configs``."""
        self._warned: set[type[Autotuner]] = set()

    def find(self) -> None:
        """Find the subclasses that exist now. Requires that no ``run`` is replaced now."""
        for autotuner_class in _subclasses(Autotuner):
            original = vars(autotuner_class).get("run")
            known_run, _ = self._classes.get(autotuner_class, (None, None))
            if original is not None and known_run is not original:
                replacement = functools.wraps(original)(self._replace(autotuner_class, original))
                self._classes[autotuner_class] = original, replacement
        self.prune_callers = {
            autotuner_class: runs
            for autotuner_class, runs in self._classes.items()
            if run_target(autotuner_class) is RunTarget.PRUNE_CONFIGS
        }

    def replace(self, only_prune_callers: bool = False) -> None:
        """Replace ``run`` of all classes, or only of the classes in ``prune_callers``."""
        for autotuner_class, (_, replacement) in (
            self.prune_callers if only_prune_callers else self._classes
        ).items():
            autotuner_class.run = replacement

    def restore(self, only_prune_callers: bool = False) -> None:
        for autotuner_class, (original, _) in (
            self.prune_callers if only_prune_callers else self._classes
        ).items():
            autotuner_class.run = original

    def warn(self, autotuner: Any) -> None:
        """Warn once per class that its kernels are not tuned."""
        autotuner_class = type(autotuner)
        if autotuner_class in self._warned:
            return
        self._warned.add(autotuner_class)
        warnings.warn(
            f"contextual_autotune: {autotuner_class.__module__}.{autotuner_class.__qualname__}, "
            f"the class of {autotuner.base_fn.__qualname__}, overrides run() without calling "
            "Triton's run() or prune_configs(). It is not tuned here, and each rank chooses its "
            "own config.",
            TuningWarning,
            stacklevel=2,
        )


def _subclasses(autotuner_class: type[Autotuner]) -> Iterator[type[Autotuner]]:
    for each in autotuner_class.__subclasses__():
        yield each
        yield from _subclasses(each)


class Launch:
    """The launch ``autotuner.run(*args, **kwargs)``, which can be made with any config.

    Callbacks are added to ``undo`` that undo the launch before the function is called again.
    """

    def __init__(
        self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], undo: ExitStack
    ) -> None:
        self._autotuner, self._args, self._kwargs, self._undo = autotuner, args, kwargs, undo
        self._nargs = dict(zip(autotuner.arg_names, args, strict=False))

    def compile(self, config: Any) -> None:
        """Compile and load ``config``, and check its resources, without a launch."""
        self._run_config_hook(config)
        options = {name: value for name, value in self._kwargs.items() if name != "warmup"}
        kernel = self._autotuner.fn.warmup(*self._args, **options, **config.all_kwargs())
        if kernel is not None:  # a hook of Triton may cancel the compilation
            kernel._init_handles()

    def run_candidate(self, config: Any, device: Device, timer: Timer, is_timed: bool) -> Any:
        """Launch a candidate, with ``timer`` around the kernel only; if ``is_timed``, with a cold
        cache."""
        autotuner, arguments = self._autotuner, self._arguments(config)
        # Triton's ``run``, which is not called here, checks this.
        conflicts = self._kwargs.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}. Make sure that you "
                "don't re-define auto-tuned symbols."
            )
        self._run_config_hook(config)
        if autotuner.user_defined_pre_hook:
            autotuner.pre_hook(arguments)
        else:
            self._reset(arguments)
            self._restore_later(arguments, autotuner.restore_value)
        if is_timed:
            device.flush_cache()
        timer.start()
        try:
            result = self._run(config)
        except Exception as error:
            if autotuner.user_defined_post_hook:
                autotuner.post_hook(arguments, exception=error)
            raise
        timer.stop()
        if autotuner.user_defined_post_hook:
            # The user's post hook may undo the run, so it is called after the end of the function.
            self._undo.callback(autotuner.post_hook, arguments, exception=None)
        return result

    def run_tuned(self, config: Any) -> Any:
        """Launch a tuned winner while other kernels of the function are still being tuned."""
        arguments = self._arguments(config)
        self._restore_later(arguments, self._autotuner.restore_value)
        if self._autotuner.user_defined_pre_hook:
            self._autotuner.pre_hook(arguments, reset_only=True)
        else:  # Triton's own hook raises if an argument to reset is ``None``
            self._reset(arguments)
        self._run_config_hook(config)
        return self._run(config)

    def run_known_config(self, config: Any) -> Any:
        """Launch a config that was known before the tuning, while other kernels are tuned."""
        names = [*self._autotuner.reset_to_zero, *self._autotuner.restore_value]
        self._restore_later(self._arguments(config), names)
        self._run_config_hook(config)
        return self._run(config)

    def run_in_production(self, config: Any) -> Any:
        """Launch a config as outside of a tuning. The launch is not undone."""
        self._run_config_hook(config)
        return self._run(config)

    def _run(self, config: Any) -> Any:
        self._autotuner.best_config = config
        return self._autotuner.fn.run(*self._args, **self._kwargs, **config.all_kwargs())

    def _arguments(self, config: Any) -> dict[str, Any]:
        return {**self._nargs, **self._kwargs, **config.all_kwargs()}

    def _run_config_hook(self, config: Any) -> None:
        if config.pre_hook is not None:
            config.pre_hook(self._arguments(config))

    def _reset(self, arguments: dict[str, Any]) -> None:
        for name in self._autotuner.reset_to_zero:
            if arguments.get(name) is not None:
                arguments[name].zero_()

    def _restore_later(self, arguments: dict[str, Any], names: list[str]) -> None:
        for tensor in map(arguments.get, names):
            if tensor is not None:
                view = without_expanded_dimensions(tensor)
                self._undo.callback(view.copy_, view.clone())
