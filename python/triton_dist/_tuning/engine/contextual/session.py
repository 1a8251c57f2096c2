"""Run one tuning by ``contextual_autotune``: call the decorated function repeatedly.

In each call, every kernel that is not tuned yet is launched with one config to try. The ranks
exchange messages at points that all of them reach: when a kernel has a new key, before the launch
of a config that must be compiled, and at the end of each call. The message at the end has the
configs that this rank launched, their failures and their times.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from triton_dist._tuning.engine.channel import Step
from triton_dist._tuning.engine.contextual.interception import Interception
from triton_dist._tuning.engine.contextual.kernel_tuning import (
    ContextualChannel,
    ContextualComponents,
    KernelTuning,
    begin_kernel_tuning,
    options_text,
    triton_key,
)
from triton_dist._tuning.engine.contextual.launch import Launch, has_own_cache
from triton_dist._tuning.engine.contextual.tuning_call import LaunchReport, TuningCall
from triton_dist._tuning.engine.report import warn_of_failures
from triton_dist._tuning.engine.trial import failure_of, shortened_error
from triton_dist._tuning.protocols import RandomState
from triton_dist._tuning.values import Failure, Measurement
from triton_dist._tuning.values.outcome import Reduction
from triton_dist._warn import warn
from triton_dist.errors import (
    NoValidConfig,
    RankDisagreement,
    RankTimeout,
    TuningWarning,
    WaitTimeout,
)

KernelTunings = MutableMapping[tuple[Any, tuple[Any, ...]], KernelTuning]
"""Kernel tunings of a decorated function, by kernel and Triton's key, in order of creation."""

_MAX_UNTUNED_KEYS = 8  # Keys still to be tuned at which a warning may be given.
_MAX_SLOWDOWN = 3.0
"""The time limit of a call is at least this multiple of the time of the call before."""


class Session:
    """Tuning of the kernels in ``tunings``, and of new kernels, until a call launches only winners.

    It is a context manager around the calls. If it exits by an exception, it restores the buffers
    that the last call changed, as Triton's ``restore_value`` requires. It drops unfinished kernel
    tunings.
    """

    def __init__(
        self,
        function: str,
        tunings: KernelTunings,
        components: ContextualComponents,
        interception: Interception,
        random_state: RandomState,
    ) -> None:
        self.random_state = random_state
        self._tunings, self._components = tunings, components
        self._interception = interception
        self._channel = ContextualChannel(
            components, function, lambda: self._current_call.unfinished_config()
        )
        self._current_call = self._next_call(0)
        self._check_results: Callable[[], None] = lambda: None
        self._scope = ExitStack()
        self._start_seconds = self._call_start_seconds = time.monotonic()

    @property
    def num_calls(self) -> int:
        """Number of calls of the function."""
        return self._current_call.number + 1

    def __enter__(self) -> Session:
        self._scope.callback(self._components.log.close)
        self._scope.enter_context(self._components.trial_context())
        self._interception.begin(self)
        self._scope.callback(self._interception.end, self)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        for key, tuning in list(self._tunings.items()):
            if tuning.is_untuned_default or (error_type is not None and tuning.winner is None):
                del self._tunings[key]
            tuning.close(error)
        if error is not None:
            self._channel.abort(error)
        with self._scope:
            if error_type is not None:
                self._undo()
        # Drop stored errors: their frames keep the function's arguments and this session alive.
        self._channel.drop_errors()
        self._current_call.no_config_left, self._check_results = None, lambda: None

    def run(self, call: Callable[[], Any]) -> Any:
        """Call the function until nothing is left to tune. Return the result of the last call."""
        # Checks of device results are deferred here and not in ``__enter__``: they need the
        # caller's thread, and ``__enter__`` may run on an autograd thread.
        with self._components.deferred_checks() as self._check_results:
            while True:
                self._call_start_seconds = time.monotonic()
                try:
                    step = Step(f"call {self._current_call.number}")
                    with self._channel.user_code(step, self._channel.limit_seconds):
                        result = call()
                except Exception as error:
                    self.fail_call(error)
                    raise
                if self.end_call():
                    return result

    def launch(self, autotuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a kernel. This method replaces ``autotuner.run``."""
        key = triton_key(autotuner, args, kwargs)
        tuning = self._tunings.get((autotuner, key))
        launch = Launch(autotuner, args, kwargs, self._current_call.undo)
        if tuning is None:
            # A group of one rank may use a config that Triton has tuned outside of this function.
            if (
                self._components.ranks.size == 1
                and not has_own_cache(autotuner)
                and key in autotuner.cache
            ):
                return launch.run_known_config(autotuner.cache[key])
            prune = functools.partial(self._interception.kept_configs, autotuner, args, kwargs)
            components, channel, number = self._components, self._channel, self._current_call.number
            tuning = begin_kernel_tuning(autotuner, key, prune, components, channel, number)
            why = (
                self._current_call.why_unusable(tuning, launch)
                if tuning.recorded_winner_text
                else ""
            )
            if why:  # some rank cannot use the recorded winner
                if components.ranks.is_leader:
                    warn(
                        f"contextual_autotune {tuning.name}: {tuning.recorded_winner_text} fails "
                        f"{why}. The kernel is tuned again",
                        TuningWarning,
                    )
                components = replace(
                    components, settings=replace(components.settings, always_tune=True)
                )
                tuning = begin_kernel_tuning(autotuner, key, prune, components, channel, number)
            self._tunings[autotuner, key] = tuning
            self._current_call.has_new_key = True
        return self._current_call.launch(tuning, launch)

    def end_call(self) -> bool:
        """Exchange the results of the call. Return whether it was the last call."""
        if self._channel.final_error is not None:  # the function has caught this error
            raise self._channel.final_error
        current_call = self._current_call
        ending = Step(f"end of call {current_call.number}")
        try:
            self._check_results()
            current_call.read_timers()
        except Exception as error:
            if isinstance(error, TimeoutError) and not isinstance(error, WaitTimeout):
                state = "its device has not finished"
                raise self._channel.record_final_error(
                    self._channel.stuck_error(ending, self._channel.limit_seconds, state)
                ) from error
            self.fail_call(error)
            raise
        by_rank = self._channel.all_gather(ending, list(current_call.reports.values()))
        positions = [
            [(r.tuning_name, r.config_digest, r.iteration) for r in reports] for reports in by_rank
        ]
        if any(each != positions[0] for each in positions):
            texts = {
                self._channel.global_rank(rank): "; ".join(
                    f"{report.tuning_name} iter {report.iteration}" for report in reports
                )
                or "none"
                for rank, reports in enumerate(by_rank)
            }
            what = f"the kernels launched in call {current_call.number}"
            raise self._channel.record_final_error(RankDisagreement(what, texts))
        for tuning, *reports in zip(current_call.reports, *by_rank, strict=True):
            # The time of the step is the maximum over the ranks. A failure on any rank counts.
            local, digest = reports[self._components.ranks.rank], reports[0].config_digest
            self._components.log.line(report_line(self._current_call.number, tuning, local))
            failures: dict[str, Failure] = {}
            for report in reports:
                failures = report.failures | failures  # keep the failure of the lowest rank
            if digest not in failures:
                slowest = max(report.milliseconds for report in reports)
                tuning.record_time(digest, slowest, self._reduction)
            for failed, failure in failures.items():
                tuning.fail(failed, failure)
            if tuning.plan.current is None:
                self._finish(tuning)
        if not current_call.reports or self._must_end():
            current_call.undo.pop_all()  # do not undo the last call
            if current_call.number:
                tuned = [tuning for tuning in self._tunings.values() if tuning.record]
                self._components.log.report(
                    summary(tuned, self.num_calls, time.monotonic() - self._start_seconds)
                )
            return True
        self._undo()
        self.random_state.rewind()
        self._current_call = self._next_call(current_call.number + 1)
        return False

    def fail_call(self, error: Exception) -> None:
        """Report to the other ranks that the function raised ``error`` on this rank."""
        if self._channel.final_error is not None:  # the other ranks have the error
            return
        if error is self._current_call.no_config_left:
            # All configs failed on this rank. They may run on other ranks, which receive the
            # failures of this rank at the end of their call.
            with suppress(Exception):
                self.end_call()
            return
        if not self._channel.all_have_joined:  # ``__exit__`` reports the error
            self._channel.record_final_error(error)
            return
        ending = Step(
            f"end of call {self._current_call.number}, which raised {shortened_error(error)}"
        )
        failure = failure_of(error, "launch", int(self._channel.global_rank(self._channel.rank)))
        # Ranks without this error raise an error that names this rank.
        with suppress(RankTimeout, RankDisagreement):
            self._channel.all_gather(ending, failure)
        self._channel.record_final_error(error)

    def _finish(self, tuning: KernelTuning) -> None:
        """Choose the winner of ``tuning``, after all its configs were measured on all ranks."""
        components = self._components
        try:
            record = tuning.finish(self._reduction)
        except NoValidConfig as error:
            tuning.close(None)  # removes the journal, so the next start tries failed configs again
            self._channel.record_final_error(error)
            raise
        tuning.publish()
        if not components.ranks.is_leader:
            where = "the leader's store"
        elif tuning.can_persist:
            where = components.store.put(record) or "memory"
            if components.remote is not None:
                components.remote.publish(record)
        else:
            where = "memory"
        tuning.close(None)
        components.log.report(
            f"{tuning.name}: best is {options_text(tuning.winner)}; kept in {where}"
        )
        if components.ranks.is_leader:
            title = f"contextual_autotune {tuning.name}"
            warn_of_failures(title, record, "the log of each rank lists them")

    def _must_end(self) -> bool:
        """Return whether the tuning must end, because each call launches kernels with new keys and
        earlier keys do not repeat."""
        report = self._current_call.reports
        left = [c for c in self._tunings.values() if c.winner is None and c not in report]
        if not self._current_call.has_new_key or len(left) < _MAX_UNTUNED_KEYS:
            return False
        warn(
            "contextual_autotune: each call launches a kernel with a key that no other call "
            f"uses, such as {left[-1].name}. The tuning ends, and {len(left)} keys have no "
            "config. Equal arguments of the function must lead to equal keys.",
            TuningWarning,
        )
        return True

    def _undo(self) -> None:
        with self._components.no_grad():
            self._current_call.undo.close()

    @property
    def _reduction(self) -> Reduction:
        return "maximum" if self._components.ranks.size > 1 else "none"

    def _next_call(self, number: int) -> TuningCall:
        if number:
            took = time.monotonic() - self._call_start_seconds
            self._channel.limit_seconds = max(
                self._components.settings.step_seconds, _MAX_SLOWDOWN * took
            )
        return TuningCall(number, self._components, self._channel, self._finish)


def report_line(call: int, tuning: KernelTuning, report: LaunchReport) -> str:
    """Return the log line about one step of this rank."""
    took = f"{report.milliseconds:.4f} ms" if report.is_timed else "warm-up"
    failed = "; ".join(map(str, report.failures.values()))
    config = options_text(tuning.triton_configs[report.config_digest])
    return f"call {call} {tuning.name} config {config} iter {report.iteration}: {failed or took}"


def summary(tuned: Sequence[KernelTuning], num_calls: int, seconds: float) -> str:
    """Return a table of the chosen configs."""
    rows = [f"{num_calls} calls of the function, {seconds:.1f} s"]
    for tuning in tuned:
        best = tuning.record.best.outcome if tuning.record else None
        took = f"{best.median:10.4f} ms" if isinstance(best, Measurement) else ""
        count = f"{len(tuning.candidates):3} configs"
        rows.append(f"  {took}  {count}  {tuning.name}  {options_text(tuning.winner)}")
    return "\n".join(rows)
