"""Trying one config on all ranks, in lock step.

A rank whose step fails does not leave: it says so in the vote that ends the step, and the config is
a :class:`Failure` on every rank. So no rank waits inside a later step for one that will not come.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.conversation import Conversation
from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.engine.restore import Restorer
from triton_dist._tuning.values import Config, Failure, FailureKind, Measurement, Outcome, Request
from triton_dist.errors import TuningAborted, TuningTimeout, WaitTimeout

_KINDS: dict[str, FailureKind] = {
    "TimeoutError": "timeout",
    "OutOfResources": "resources",
    "OutOfMemoryError": "resources",
    "SymmetricMemoryFull": "resources",
    "MemoryError": "resources",
    "CandidateFailed": "compile",
    "CompilationError": "compile",
    "PTXASError": "compile",
}
"""By the name of an exception's class or base: those of torch and triton are not imported here."""


class _WrongResult(Exception):
    pass


@dataclass(frozen=True)
class _Vote:
    """How a step went on one rank."""

    failure: Failure | None
    samples: tuple[float, ...] = ()


class Attempts:
    """Tries configs of one call."""

    def __init__(
        self,
        subject: Subject,
        parts: Parts,
        call: Call,
        ranks: Conversation,
        ahead: CompileAhead,
        settle: Callable[[], None],
        restorer: Restorer,
    ) -> None:
        """``settle`` waits for the device if some op asks for it, and raises if a wait in a kernel
        gave up: what the ops leave to be done outside of the timed part. ``restorer``: of the
        arguments that the function changes."""
        self._subject, self._parts, self._call, self._ranks = subject, parts, call, ranks
        self._ahead, self._settle, self._restorer = ahead, settle, restorer
        self._ready: set[str] = set()
        self._reference: tuple[Any] | None = None
        self._first_measured: Config | None = None

    def measured_before(self, config: Config) -> None:
        """An earlier start measured ``config``; its output is the reference if it was the first."""
        self._first_measured = self._first_measured or config

    def attempt(self, request: Request, label: str) -> Outcome:
        """Prepare, run once and check, at the first request of a config; then measure.

        Args:
            label: the place of the config among the candidates, in words.

        Raises:
            TuningTimeout: a rank did not come to a vote.
            TuningAborted: after a failure, some rank could not be brought back into order.
        """
        self._ranks.config = request.config
        clock = self._ranks.clock
        try:
            with clock.phase("compile"):
                failure = self._prepare(request, label)
            if failure is not None:
                return failure
            with clock.phase("measure"):
                return self._first_run_of(request, label) or self._measure(request, label)
        finally:
            self._ranks.config = None

    def _prepare(self, request: Request, label: str) -> Failure | None:
        """Compile, and launch nothing; done once with a config."""
        if request.config.digest in self._ready:
            return None
        prepare, limit = self._subject.hooks.prepare, self._parts.compile_seconds
        args, kwargs, arguments = self._call.args, self._call.kwargs, request.config.arguments()
        if self._ahead.is_needed(request.config):
            waiting = f"compile {label}"

            def compiled() -> None:
                self._user(waiting, lambda: self._ahead.wait(request.config), limit)

            failure = self._vote(waiting, "compile", compiled, limit)[0]
            if failure is not None:
                return failure
            self._ahead.is_done(request.config)
        if prepare is not None:
            phase = f"prepare {label}"

            def compile_only() -> None:
                self._user(phase, lambda: prepare(*args, **kwargs, **arguments), limit)

            return self._vote(phase, "compile", compile_only, limit)[0]
        return None

    def _first_run_of(self, request: Request, label: str) -> Failure | None:
        """Done once with a config; ``None`` when it can be measured."""
        if request.config.digest in self._ready:
            return None
        phase, arguments = f"run {label}", request.config.arguments()
        failure = self._vote(phase, "launch", lambda: self._first_run(phase, arguments))[0]
        if failure is not None:
            self._recover(request.config, failure, label)
            return failure
        self._ready.add(request.config.digest)
        return None

    def _measure(self, request: Request, label: str) -> Outcome:
        """The slowest rank of each sample counts."""
        function, args, kwargs = self._subject.function, self._call.args, self._call.kwargs
        calls: list[Callable[[], Any]] = [
            functools.partial(function, *args, **kwargs, **request.config.arguments())
        ]
        measured: list[Measurement] = []
        failure: Failure | None = None
        if self._parts.policy.timing == "graph":
            # Voted on its own: no rank replays what another could not capture.
            phase = f"capture {label}"
            failure, _ = self._vote(
                phase, "launch", lambda: calls.append(self._captured(phase, calls[0]))
            )
        if failure is None:
            phase = f"measure {label}"
            failure, samples = self._vote(
                phase,
                "launch",
                lambda: measured.append(self._own_samples(phase, calls[-1], request.samples)),
                of=measured,
            )
        if failure is not None:
            self._recover(request.config, failure, label)
            return failure
        return Measurement(samples, measured[0].warmup, "maximum")

    def _vote(
        self,
        phase: str,
        kind: FailureKind,
        step: Callable[[], object],
        after: float | None = None,
        of: Sequence[Measurement] = (),
    ) -> tuple[Failure | None, tuple[float, ...]]:
        """Take ``step``, which other ranks may need ``after`` seconds for.

        Returns, on every rank: the failure of the lowest rank on which it failed; or of each sample
        that the step has put into ``of`` the slowest rank's.
        """
        own: Failure | None = None
        limit = self._parts.seconds if after is None else after
        try:
            step()
        except TuningTimeout:
            raise
        except Exception as error:
            if self._ranks.lost is not None:
                raise
            own = failure_of(error, kind, int(self._ranks.named(self._ranks.rank)))
            self._ranks.remark = f"On this rank it failed: {own.message}."
        votes = self._ranks.gather(phase, _Vote(own, *(each.samples for each in of)), limit)
        self._ranks.remark = ""
        failure = next((vote.failure for vote in votes if vote.failure is not None), None)
        if failure is not None:
            return failure, ()
        columns = zip(*(vote.samples for vote in votes), strict=True)
        return None, tuple(max(column) for column in columns)

    def _user(self, phase: str, call: Callable[[], Any], seconds: float | None = None) -> Any:
        """Call the user's code under the watchdog's eyes."""
        with self._ranks.user_code(phase, seconds) as watch:
            watch.begin()
            return call()

    def _first_run(self, phase: str, arguments: dict[str, Any]) -> None:
        """One run to the end: compiles what is not compiled, and gives the output to check.

        The first config that runs is the reference of all others. Its output is copied, because a
        function may return the same buffer each time.
        """
        check = self._subject.hooks.check
        if check is not None and self._reference is None and self._first_measured is not None:
            output = self._run_once(phase, self._first_measured.arguments())
            self._reference = (copy.deepcopy(output),)
        output = self._run_once(phase, arguments)
        if check is None:
            return
        if self._reference is None:
            self._reference = (copy.deepcopy(output),)
        reference = self._reference[0]
        try:
            verdict = self._user(phase, lambda: check(output, reference))
        except Exception as error:
            raise _WrongResult(text_of(error)) from error
        if verdict is not None and not verdict:
            raise _WrongResult("check_fn rejected its output")

    def _run_once(self, phase: str, arguments: dict[str, Any]) -> Any:
        function, args, kwargs = self._subject.function, self._call.args, self._call.kwargs
        self._user(phase, self._reset)
        output = self._user(phase, lambda: function(*args, **kwargs, **arguments))
        self._settle()
        self._parts.device.synchronize(self._parts.seconds)
        return output

    def _captured(self, phase: str, call: Callable[[], Any]) -> Callable[[], Any]:
        parts = self._parts
        self._user(phase, self._reset)
        replay: Callable[[], Any] = self._user(
            phase, lambda: parts.device.capture(call, parts.seconds)
        )
        self._settle()
        return replay

    def _own_samples(self, phase: str, call: Callable[[], Any], samples: int) -> Measurement:
        failure: Exception | None = None

        # One watch for all runs, because setting one up takes longer than some functions.
        with self._ranks.user_code(phase) as watch:

            def align(hold: Callable[[], object]) -> None:
                nonlocal failure
                try:  # if this raises, the others align now all the same: so does this rank
                    if failure is None:
                        self._settle()  # the run before
                        watch.begin()
                        self._reset()
                except Exception as error:
                    failure = error
                watch.end()
                self._ranks.align(phase, hold)

            def run() -> None:
                if failure is not None:
                    raise failure
                watch.begin()
                try:
                    call()
                finally:
                    watch.end()

            measured = self._parts.benchmarker.measure(run, self._parts.policy, align, samples)
            self._settle()  # the last run
        return measured

    def _reset(self) -> None:
        self._restorer.restore()
        if self._subject.hooks.reset is not None:
            self._subject.hooks.reset(*self._call.args, **self._call.kwargs)

    def _recover(self, config: Config, failure: Failure, label: str) -> None:
        """Bring all ranks back into order after a failure that may have launched on some of
        them."""
        phase, recover, own = f"recover after {label}", self._subject.hooks.recover, None
        try:
            if recover is not None:
                self._user(phase, lambda: recover(*self._call.args, **self._call.kwargs))
            with suppress(WaitTimeout):  # left by a run that raised: not the next config's fault
                self._settle()
            self._parts.device.synchronize(self._parts.seconds)
        except TuningTimeout:
            raise
        except Exception as error:
            own = text_of(error)
        votes = self._ranks.gather(phase, own, self._parts.seconds)
        causes = {
            self._ranks.named(rank): cause for rank, cause in enumerate(votes) if cause is not None
        }
        if causes:
            if self._ranks.is_leader:
                self._ranks.quarantine(config, failure)
            raise TuningAborted(self._subject.name, config, causes)


def failure_of(error: Exception, kind: FailureKind, rank: int) -> Failure:
    if isinstance(error, _WrongResult):
        return Failure("wrong_result", str(error), rank)
    known = (_KINDS[base.__name__] for base in type(error).__mro__ if base.__name__ in _KINDS)
    return Failure(next(known, kind), text_of(error), rank)


def text_of(error: Exception) -> str:
    """Type and message; the middle of a very long one, such as a compiler's output, is left out."""
    message = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-500:]}"
