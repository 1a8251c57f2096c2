"""One launch of an autotuned kernel, with the hooks that Triton runs around it.

Triton's own tuning runs a kernel many times in a row and undoes each run at once. Here the rest of
the function needs what the kernel did, so a run is undone when the *function* is at its end, before
it is called again; what the last call did stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_dist._tuning.engine.restore import elements
from triton_dist._tuning.protocols import Device, Timer


class Undo:
    """Steps to undo before the function is called again, the last first."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        self._steps.append(step)

    def restore_later(self, tensor: Any) -> None:
        if tensor is not None:
            copy = elements(tensor).clone()
            self.add(lambda: elements(tensor).copy_(copy))

    def undo(self) -> None:
        while self._steps:
            self._steps.pop()()

    def forget(self) -> None:
        self._steps.clear()


class Launch:
    """The launch ``tuner.run(*args, **kwargs)``, for any config."""

    def __init__(
        self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], undo: Undo
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
        self._refuse_conflicts(config)
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
            self._undo.add(lambda: tuner.post_hook(arguments, exception=None))
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
        for name in names:
            self._undo.restore_later(arguments.get(name))

    def _refuse_conflicts(self, config: Any) -> None:
        conflicts = self._kwargs.keys() & config.kwargs.keys()
        if conflicts:
            raise ValueError(
                f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}. Make sure that you "
                "don't re-define auto-tuned symbols."
            )
