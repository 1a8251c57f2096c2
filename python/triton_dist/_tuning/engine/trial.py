"""Try one config on all ranks in lockstep, and time its runs with the device's timer.

A trial is a sequence of steps, such as compile, run and measure. Each step ends with a message. If
a step fails on a rank, the rank reports the failure in this message, and all ranks record a
:class:`Failure` of the config. So no rank waits for a failed rank in a later step.
"""

from __future__ import annotations

import copy
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.components import Call, Components, TunedFunction
from triton_dist._tuning.engine.inputs import Arguments, Restorer
from triton_dist._tuning.engine.watchdog import Watch
from triton_dist._tuning.protocols import Device, Timer
from triton_dist._tuning.values import (
    Config,
    Failure,
    FailureKind,
    Measurement,
    Outcome,
    Policy,
    Request,
)
from triton_dist._tuning.values.show import error_text
from triton_dist.errors import (
    RankDisagreement,
    TritonDistError,
    TuningAborted,
    TuningTimeout,
    WaitTimeout,
    original_error,
)

# The queueing time is the time that the host needs to queue a run. ``delay_stream`` keeps the
# device busy for this time before each run. The stored time decays by this factor at each run, so
# that one delay of the host does not lengthen all later runs.
_QUEUEING_DECAY = 0.9
# Maximum queueing time in seconds that is stored after the first run of a config.
_MAX_FIRST_QUEUEING = 1e-3


class Sampler:
    """Measure repeated runs with a cold cache. All ranks start each run together.

    Args:
        seconds: time limit of each wait for other ranks, and of the wait for all queued runs.
        run_checks: called after each run, untimed. Raises if a wait in a kernel reached its time
            limit.
    """

    def __init__(
        self,
        device: Device,
        ranks: Channel,
        policy: Policy,
        seconds: float,
        run_checks: Callable[[], object],
    ) -> None:
        self._device, self._ranks, self._policy = device, ranks, policy
        self._seconds, self._run_checks = seconds, run_checks
        self._queueing_seconds: dict[Config | None, float] = {}
        """By config: seconds that the host needed to queue recent runs."""

    def note_queueing_seconds(self, config: Config, seconds: float) -> None:
        """Store the seconds, at most 1 ms, to queue a config's first run, which also loads the
        kernel."""
        self._queueing_seconds.setdefault(config, min(seconds, _MAX_FIRST_QUEUEING))

    def sample(
        self, step: Step, call: Callable[[], Any], number: int, reset: Callable[[], object]
    ) -> tuple[float, ...]:
        """Return the milliseconds of ``number`` runs, after ``policy.warmup`` untimed runs.

        If a run fails on this rank, this rank still synchronises with the other ranks before each
        later run, and raises after the last run.

        Args:
            reset: user code that is called, untimed, before each run.
        """
        failures: list[Exception] = []
        timers: list[Timer] = []
        # Use one watch for all runs: creating a watch takes longer than some functions run.
        with self._ranks.user_code(step, start_now=False) as watch:
            for _ in range(self._policy.warmup + number):
                timers.append(self._device.timer())
                if not failures:
                    with _collecting_exceptions(failures):
                        self._run_checks()  # the previous run
                        with watch:
                            reset()
                self._ranks.all_gather(step, None, self._seconds)
                with _collecting_exceptions(failures):
                    # Keep the device busy until the host has queued the call. Otherwise the timer
                    # includes the launch latency of the host. A failed rank does this too.
                    if not failures and self._policy.flush:
                        self._device.flush_cache()
                    self._device.delay_stream(self._queueing_seconds.get(step.config, 0.0))
                self._ranks.device_barrier()
                if not failures:
                    with _collecting_exceptions(failures):
                        self._run(step, watch, timers[-1], call)
            if failures:
                try:
                    raise failures[0]
                finally:
                    failures.clear()  # the error refers to this frame
            self._device.synchronize(self._seconds)
            # Round to 1 ns: finer digits are noise and make records hard to read.
            times = (round(timer.milliseconds(), 6) for timer in timers[self._policy.warmup :])
            samples = tuple(times)
            self._run_checks()  # the last run
        return samples

    def _run(self, step: Step, watch: Watch, timer: Timer, call: Callable[[], Any]) -> None:
        timer.start()
        began = time.perf_counter()
        with watch:
            call()
        took = time.perf_counter() - began
        earlier = _QUEUEING_DECAY * self._queueing_seconds.get(step.config, 0.0)
        self._queueing_seconds[step.config] = max(took, earlier)
        timer.stop()


@contextmanager
def _collecting_exceptions(failures: list[Exception]) -> Iterator[None]:
    """Context manager that adds an exception of its block to ``failures``."""
    try:
        yield
    except Exception as error:
        failures.append(error)


_KIND_BY_EXCEPTION: dict[str, FailureKind] = {
    "TimeoutError": "timeout",
    "OutOfResources": "resources",
    "OutOfMemoryError": "resources",
    "SymmetricMemoryFull": "resources",
    "MemoryError": "resources",
    "CandidateFailed": "compile",
    "CompilationError": "compile",
    "PTXASError": "compile",
}
"""Kind of failure by the name of the exception class or a base class. Names are compared, because
torch and triton are not imported here."""


class _WrongResult(Exception):
    pass


class _StepFailed(Exception):
    """A step failed on some rank. Raised on every rank."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class TrialRunner:
    """Trials of configs for one call of the tuned function.

    Args:
        compile_ahead: compiles candidates in other processes.
        run_checks: runs the checks that ops defer to the end of the timed part. Waits for the
            device if there are checks. Raises if a wait in a kernel reached its time limit.
        restorer: restores the arguments that the function changes.
        sample_calls: the calls of which a sample is the mean or the maximum.
        is_single_config: there is only one config, so one run is enough.
    """

    def __init__(
        self,
        tuned_fn: TunedFunction,
        components: Components,
        call: Call,
        ranks: Channel,
        compile_ahead: CompileAhead,
        run_checks: Callable[[], None],
        restorer: Restorer,
        sample_calls: Sequence[Arguments],
        is_single_config: bool = False,
    ) -> None:
        self._tuned_fn, self._components, self._call, self._ranks = (
            tuned_fn,
            components,
            call,
            ranks,
        )
        self._compile_ahead, self._run_checks, self._restorer = compile_ahead, run_checks, restorer
        self._sample_calls, self._is_single_config = sample_calls, is_single_config
        self._started_digests: set[str] = set()
        self._has_run = False
        policy, seconds = components.settings.policy, components.settings.step_seconds
        self._sampler = Sampler(components.device, ranks, policy, seconds, run_checks)
        self._reference: tuple[Any] | None = None
        self._first_measured: Config | None = None
        """The first config that was measured, possibly in an earlier start of the program."""
        self.samples_by_rank: Sequence[Sequence[float]] = ()
        """Samples of each rank in the last attempt. Empty if it failed."""
        self._error: Exception | None = None
        """First exception of a config on this rank. ``None`` after a config was measured."""

    def take_error(self) -> Exception | None:
        """Return the first exception of a config, and drop it: its frames refer to this object."""
        error, self._error = self._error, None
        return error

    def note_earlier_measurement(self, config: Config) -> None:
        """Note that an earlier start of the program measured ``config``.

        Outputs are compared with the output of the config that was measured first.
        """
        self._first_measured = self._first_measured or config

    def undo_last_run(self) -> None:
        """Call ``reset_fn`` after the last run of the tuning, before the user's own call."""
        if self._tuned_fn.hooks.reset is None or not self._has_run:
            return
        step, failure = Step("reset after the last run"), None
        try:
            self._on_all_ranks(step, "launch", lambda: self._call_user_code(step, self._reset))
        except _StepFailed as failed:
            failure = failed.failure
        if failure is not None:  # raised outside of the ``except`` block: no context
            raise TritonDistError(
                f"{self._tuned_fn.name}: reset_fn failed after the last run of a tuning, on rank "
                f"{failure.rank}: {failure.message}. The changes of the run are not undone. Fix "
                "reset_fn and start again: measurements are kept"
            )

    def run_trial(self, request: Request, label: str) -> Outcome:
        """Measure the config of ``request``. Compile, run and check it first if it is new."""
        self.samples_by_rank = ()
        config, clock = request.config, self._ranks.clock
        is_new, has_run, failure = config.digest not in self._started_digests, False, None
        try:
            with clock.phase("compile"):
                if is_new:
                    self._prepare(config, label)
            with clock.phase("measure"):
                has_run = self._has_run = True
                if is_new:
                    step, arguments = Step(f"run {label}", config), config.arguments()
                    samples = self._on_all_ranks(
                        step, "launch", lambda: self._first_run(step, arguments)
                    )
                    self._started_digests.add(config.digest)
                if is_new and self._is_single_config:
                    measured = Measurement(samples, 0, "maximum")
                else:
                    measured = self._measure(request, label)
                self._first_measured, self._error = self._first_measured or config, None
                return measured
        except _StepFailed as failed:
            failure = failed.failure
        if has_run:
            with clock.phase("measure"):
                self.recover(label, config, failure)
        return failure

    def _prepare(self, config: Config, label: str) -> None:
        prepare, call = self._tuned_fn.hooks.prepare, self._call
        if self._compile_ahead.must_compile(config):
            step = Step(f"compile {label}", config)
            self._compile(step, functools.partial(self._compile_ahead.wait, config))
            self._compile_ahead.mark_compiled(config)
        if prepare is not None:
            step, chosen = Step(f"prepare {label}", config), config.arguments()
            self._compile(step, functools.partial(prepare, *call.args, **call.kwargs, **chosen))

    def _compile(self, step: Step, work: Callable[[], object]) -> None:
        """Run ``work`` with the time limit for compiling."""
        limit = self._components.settings.compile_seconds

        def watched() -> None:
            self._call_user_code(step, work, limit)

        self._on_all_ranks(step, "compile", watched, limit)

    def _measure(self, request: Request, label: str) -> Measurement:
        """Return the samples of a config. Each is the maximum over the ranks' times."""
        config, policy = request.config, self._components.settings.policy
        function, chosen = self._tuned_fn.function, config.arguments()

        def run_all(calls: Sequence[Arguments]) -> None:  # one call after another
            for args, kwargs in calls:
                function(*args, **kwargs, **chosen)

        # A sample is the time of the slowest call (each call is timed alone), or the mean of all.
        is_worst = self._tuned_fn.hooks.worst_input
        batches = [[each] for each in self._sample_calls] if is_worst else [self._sample_calls]
        runs: list[Callable[[], Any]] = [functools.partial(run_all, calls) for calls in batches]

        def capture() -> None:
            device, seconds = self._components.device, self._components.settings.step_seconds
            for number, run in enumerate(runs):
                self._call_user_code(step, self._reset)
                captured = functools.partial(device.capture, run, seconds)
                runs[number] = self._call_user_code(step, captured)
                self._run_checks()

        def samples() -> Sequence[float]:  # milliseconds per call
            times = [
                self._sampler.sample(step, run, request.num_samples, self._reset) for run in runs
            ]
            return [round(max(each) / len(batches[0]), 6) for each in zip(*times, strict=True)]

        if policy.timing == "graph":
            # A separate step: if one rank cannot capture the run, no rank replays it.
            step = Step(f"capture {label}", config)
            self._on_all_ranks(step, "launch", capture)
        step = Step(f"measure {label}", config)
        return Measurement(self._on_all_ranks(step, "launch", samples), policy.warmup, "maximum")

    def _on_all_ranks(
        self,
        step: Step,
        kind: FailureKind,
        work: Callable[[], Sequence[float] | None],
        user_seconds: float | None = None,
    ) -> tuple[float, ...]:
        """Run ``work`` on all ranks, for at most ``user_seconds`` on each rank.

        Return, for each sample, the maximum over the ranks. If the step failed on some rank, raise
        ``_StepFailed`` on every rank, with the failure of the lowest failed rank. ``kind`` is the
        kind of the failure unless the class of the exception sets another kind.
        """
        failure: Failure | None = None
        samples: tuple[float, ...] = ()
        self.samples_by_rank = ()
        try:
            samples = tuple(work() or ())
        except TuningTimeout:
            raise
        except Exception as error:
            if self._ranks.final_error is not None:
                raise
            failure = failure_of(error, kind, int(self._ranks.global_rank(self._ranks.rank)))
            if self._error is None and self._first_measured is None:
                self._error = error
                traceback.clear_frames(error.__traceback__)  # frames keep tensors alive
            # If another rank is missing at the end of the step, the error that this rank raises
            # should contain this rank's failure.
            step = replace(step, remark=f"On this rank it failed: {failure.message}.")
        limit = self._components.settings.step_seconds if user_seconds is None else user_seconds
        results: list[Failure | tuple[float, ...]] = self._ranks.all_gather(
            step, failure or samples, limit
        )
        for result in results:
            if isinstance(result, Failure):
                raise _StepFailed(result)
        self.samples_by_rank = [result for result in results if not isinstance(result, Failure)]
        return tuple(map(max, zip(*self.samples_by_rank, strict=True)))

    def _call_user_code(
        self, step: Step, call: Callable[[], Any], seconds: float | None = None
    ) -> Any:
        """Call user code. The watchdog ends the process if it takes longer than ``seconds``."""
        with self._ranks.user_code(step, seconds):
            return call()

    def _first_run(self, step: Step, arguments: dict[str, Any]) -> Sequence[float]:
        """Run the config once, and check its output with ``check_fn``.

        Return the milliseconds of the run if there is only one config, else an empty list. The
        reference is a copy of the first config's output, whose buffer the function may reuse.
        """
        check = self._tuned_fn.hooks.check
        if check is not None and self._reference is None and self._first_measured is not None:
            output = self._run_once(step, self._first_measured.arguments())
            self._reference = (copy.deepcopy(output),)
        timer = self._components.device.timer() if self._is_single_config else None
        output = self._run_once(step, arguments, timer)
        milliseconds = [] if timer is None else [round(timer.milliseconds(), 6)]
        if check is None:
            return milliseconds
        self._reference = self._reference or (copy.deepcopy(output),)
        reference = self._reference[0]
        try:
            verdict = self._call_user_code(step, lambda: check(output, reference))
        except Exception as error:
            raise _WrongResult(shortened_error(error)) from error
        if verdict is not None and not verdict:
            raise _WrongResult("check_fn rejected its output")
        return milliseconds

    def _run_once(self, step: Step, arguments: dict[str, Any], timer: Timer | None = None) -> Any:
        function, args, kwargs = self._tuned_fn.function, self._call.args, self._call.kwargs
        self._call_user_code(step, self._reset)
        if timer is not None:
            timer.start()
        began = time.perf_counter()
        output = self._call_user_code(step, lambda: function(*args, **kwargs, **arguments))
        if step.config is not None and self._components.settings.policy.timing == "events":
            took = time.perf_counter() - began
            self._sampler.note_queueing_seconds(step.config, took * len(self._sample_calls))
        if timer is not None:
            timer.stop()
        self._run_checks()
        self._components.device.synchronize(self._components.settings.step_seconds)
        return output

    def _reset(self) -> None:
        self._restorer.restore()
        if self._tuned_fn.hooks.reset is not None:
            self._tuned_fn.hooks.reset(*self._call.args, **self._call.kwargs)

    def recover(
        self, label: str, config: Config | None = None, failure: Failure | None = None
    ) -> None:
        """Call ``recover_fn`` on all ranks after a run failed, because its kernels may have changed
        the state of some rank.

        Args:
            label: text that names what failed, for messages.
            config: the failed config, if it is a candidate.
            failure: the failure of ``config``.

        Raises:
            TuningAborted: ``recover_fn`` failed on some rank; raised on every rank.
        """
        step, recover = Step(f"recover after {label}", config), self._tuned_fn.hooks.recover
        failure_text: str | None = None
        try:
            if recover is not None:
                self._call_user_code(step, lambda: recover(*self._call.args, **self._call.kwargs))
            # Discard errors of the failed run, which would otherwise be reported for the next
            # config.
            with suppress(WaitTimeout, RankDisagreement):
                self._run_checks()
            self._components.device.synchronize(self._components.settings.step_seconds)
        except TuningTimeout:
            raise
        except Exception as error:
            failure_text = shortened_error(error)
        errors = self._ranks.all_gather(step, failure_text, self._components.settings.step_seconds)
        causes = {
            self._ranks.global_rank(rank): cause
            for rank, cause in enumerate(errors)
            if cause is not None
        }
        if causes:
            if self._ranks.is_leader and config is not None and failure is not None:
                self._ranks.quarantine(config, failure)
            raise TuningAborted(self._tuned_fn.name, config, causes)


def failure_of(error: Exception, kind: FailureKind, rank: int) -> Failure:
    """Return ``error`` as a failure. The kind is given by the class of ``error``, else ``kind``."""
    if isinstance(error, _WrongResult):
        return Failure("wrong_result", str(error), rank)
    bases = type(original_error(error)).__mro__
    known = (
        _KIND_BY_EXCEPTION[base.__name__] for base in bases if base.__name__ in _KIND_BY_EXCEPTION
    )
    return Failure(next(known, kind), shortened_error(error), rank)


def shortened_error(error: Exception) -> str:
    """Return type and message of ``error``. The middle of a long message is removed.

    For a timeout in a clean-up after another exception, begin with the other exception.
    """
    cause = original_error(error)
    message = (
        error_text(error) if cause is error else f"{error_text(cause)}; then {error_text(error)}"
    )
    message = message.encode("utf-8", "backslashreplace").decode()
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-500:]}"
