"""Launch the kernels of one call of a function with ``@contextual_autotune`` that is tuned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from triton_dist._tuning.engine.channel import Step
from triton_dist._tuning.engine.choice import is_caused_by_config
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.contextual.kernel_tuning import (
    ContextualChannel,
    ContextualComponents,
    KernelTuning,
    jit_function,
    options_text,
)
from triton_dist._tuning.engine.contextual.launch import Launch
from triton_dist._tuning.engine.trial import failure_of
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import Timer
from triton_dist._tuning.values import Config, Failure
from triton_dist._tuning.values.show import error_text
from triton_dist.errors import NoValidConfig, RankDisagreement, RankTimeout, WaitTimeout

_ERRORS_OF_OTHER_RANKS = (RankTimeout, RankDisagreement, WaitTimeout)
"""Errors of which the launched config is not the cause."""


@dataclass
class LaunchReport:
    """Report on the launch of one kernel that is being tuned. It is sent to the other ranks."""

    tuning_name: str
    config_digest: str
    iteration: int
    is_timed: bool
    failures: dict[str, Failure] = field(default_factory=dict)
    """The configs that failed on this rank: the current config, and configs launched instead."""
    milliseconds: float = 0.0
    """Time of the launch, if it is timed and did not fail."""


class TuningCall:
    """One call of the decorated function.

    Attributes:
        reports: reports on the kernels that are being tuned, in launch order.
        undo: callbacks that undo changes, to run before the function is called again.
        has_new_key: whether a kernel was launched with a new key.
        no_config_left: the error of this call if every config of some kernel failed on this rank.
    """

    def __init__(
        self,
        number: int,
        components: ContextualComponents,
        channel: ContextualChannel,
        finish: Callable[[KernelTuning], object],
    ) -> None:
        self.number = number
        self._components, self._channel, self._finish = components, channel, finish
        self.reports: dict[KernelTuning, LaunchReport] = {}
        self._launched_configs: dict[KernelTuning, Config] = {}
        self._timers: dict[KernelTuning, Timer] = {}
        self._compiling: tuple[KernelTuning, Config] | None = None
        self.undo = ExitStack()
        self.has_new_key = False
        self.no_config_left: NoValidConfig | None = None

    def launch(self, tuning: KernelTuning, launch: Launch) -> Any:
        """Launch the winner of ``tuning``, or the config to try next if there is no winner yet."""
        if tuning.winner is None and tuning not in self.reports:
            self._compile_current(tuning, launch)
            if tuning.plan.current is None:
                self._finish(tuning)
        if tuning.winner is not None:
            tuning.write_to_triton_cache()  # the user may have cleared the cache
            return (launch.run_tuned if tuning.was_tuned else launch.run_known_config)(
                tuning.winner
            )
        if tuning not in self.reports:
            return self._launch_current(tuning, launch)
        config = self._launched_configs[tuning]  # a second launch in this call
        device = self._components.device
        return launch.run_candidate(
            tuning.triton_configs[config.digest], device, device.timer(), is_timed=False
        )

    def why_unusable(self, tuning: KernelTuning, launch: Launch) -> str:
        """Compile a recorded winner. Return, on all ranks, why some rank cannot use it; empty if
        all can."""
        if jit_function(tuning.autotuner) is None:
            return ""
        failure = ""
        try:
            with watchdog.paused():
                launch.compile(tuning.winner)
        except Exception as error:
            # Ignore other errors here: the launch raises them again.
            failure = error_text(error) if is_caused_by_config(error) else ""
        step = Step(f"call {self.number}: compile the recorded winner of {tuning.name}")
        reasons = self._channel.all_gather(step, failure, self._components.settings.compile_seconds)
        ranks = map(self._channel.global_rank, range(len(reasons)))
        return next(
            (f"on rank {r}: {why}" for r, why in zip(ranks, reasons, strict=True) if why), ""
        )

    def read_timers(self) -> None:
        """Wait for the device, and store the time of each timed launch."""
        if self._timers:
            self._components.device.synchronize(self._channel.limit_seconds)
        for tuning, timer in self._timers.items():
            report = self.reports[tuning]
            if report.is_timed and report.config_digest not in report.failures:
                # Round to 1 ns: finer digits are noise and make records hard to read.
                report.milliseconds = round(timer.milliseconds(), 6)

    def unfinished_config(self) -> tuple[KernelTuning, Config] | None:
        """Return the config that compiles now, or the first launched config that the device has
        not finished."""
        if self._compiling is not None:
            return self._compiling
        # A copy: the watchdog calls this from its thread.
        for tuning, config in list(self._launched_configs.items()):
            timer = self._timers.get(tuning)
            if timer is None or not timer.is_done():
                return tuning, config
        return None

    @property
    def _global_rank(self) -> int:
        return int(self._channel.global_rank(self._components.ranks.rank))

    def _compile_current(self, tuning: KernelTuning, launch: Launch) -> None:
        """Compile the config of the next step on all ranks. If it fails, drop it and continue with
        the step after it."""
        if jit_function(tuning.autotuner) is None:
            return
        compile_ahead = tuning.compile_ahead
        if compile_ahead is None:
            # Compile in other processes while the first configs run. If several ranks of a host
            # lack a kernel, one of them compiles it.
            compile_ahead = tuning.compile_ahead = CompileAhead(
                lambda config: launch.compile(tuning.triton_configs[config.digest]),
                self._components.compiler,
                self._components.settings.compile_seconds,
                self._channel,
            )
            with watchdog.paused():
                compile_ahead.begin(
                    [c for c in tuning.candidates if c.digest not in tuning.failures]
                )
        while (step := tuning.plan.current) is not None:
            config, digest = step.config, step.config.digest
            if digest in tuning.compiled:
                return
            failure = None
            if compile_ahead.must_compile(config):
                wait = functools.partial(compile_ahead.wait, config)
                failure = self._compile_on_all_ranks("wait for", tuning, config, wait)
            if failure is None:
                compile_ahead.mark_compiled(config)
                compile_own = functools.partial(launch.compile, tuning.triton_configs[digest])
                failure = self._compile_on_all_ranks("compile", tuning, config, compile_own)
            if failure is None:
                tuning.compiled.add(digest)
                return
            self._components.log.line(
                f"{tuning.name} config {options_text(tuning.triton_configs[digest])}: {failure}"
            )
            tuning.fail(digest, failure)

    def _compile_on_all_ranks(
        self, what: str, tuning: KernelTuning, config: Config, work: Callable[[], object]
    ) -> Failure | None:
        """Run ``work`` on all ranks. Return the failure of the lowest rank that failed, if any."""
        failure: Failure | None = None
        step = Step(f"call {self.number}: {what} {tuning.name} {config}")
        limit, self._compiling = self._components.settings.compile_seconds, (tuning, config)
        try:
            with watchdog.paused(), self._channel.user_code(step, limit):
                work()
        except Exception as error:
            failure = failure_of(error, "compile", self._global_rank)
        failures = self._channel.all_gather(step, failure, limit)
        self._compiling = None
        return next((failure for failure in failures if failure is not None), None)

    def _launch_current(self, tuning: KernelTuning, launch: Launch) -> Any:
        """Launch the config of the plan's next step, or another one if this rank cannot launch it.

        Without a launch, other ranks would wait for signals of this kernel.
        """
        step, device = tuning.plan.current, self._components.device
        assert step is not None  # otherwise the tuning has a winner
        digest = step.config.digest
        timer = device.timer()
        report = LaunchReport(tuning.name, digest, tuning.launches[digest], step.is_timed)
        self.reports[tuning], self._launched_configs[tuning] = report, step.config
        last_error: Exception | None = None
        tuning.trying(digest)
        try:
            for config in (step.config, *tuning.fallbacks(digest)):
                try:
                    triton_config = tuning.triton_configs[config.digest]
                    result = launch.run_candidate(triton_config, device, timer, step.is_timed)
                except _ERRORS_OF_OTHER_RANKS:
                    raise
                except Exception as error:
                    last_error, timer = error, device.timer()
                    report.failures[config.digest] = failure_of(error, "launch", self._global_rank)
                    continue
                self._launched_configs[tuning], self._timers[tuning] = config, timer
                return result
            failures = report.failures | tuning.failures
            causes = {str(config): str(failures[config.digest]) for config in tuning.candidates}
            self.no_config_left = NoValidConfig(tuning.name, tuning.key, causes)
            raise self.no_config_left from last_error
        finally:
            last_error = None  # the error refers to this frame
