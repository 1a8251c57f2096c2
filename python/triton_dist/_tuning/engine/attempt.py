"""Trying one config on all ranks, in lock step.

A rank whose step fails does not leave: it says so in the vote that ends the step, and the config is
a :class:`Failure` on every rank. So no rank waits inside a later step for one that will not come.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.values import Config, Failure, FailureKind, Measurement, Outcome
from triton_dist.errors import RankDisagreement, RankTimeout, TuningAborted

_LOST_RANKS = (RankTimeout, RankDisagreement)
"""The ranks are out of step: no vote can be held, so these end the tuning."""

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


class Attempts:
    """Tries configs of one call."""

    def __init__(self, subject: Subject, parts: Parts, call: Call) -> None:
        self._subject, self._parts, self._call = subject, parts, call
        self._reference: tuple[Any] | None = None

    def attempt(self, config: Config, label: str) -> Outcome:
        """Prepare, run once, check, measure; the slowest rank of each sample counts.

        Args:
            label: names the config in the error of a rank that waited in vain for another.

        Raises:
            RankTimeout: a rank did not come to a vote in time.
            TuningAborted: after a failure, some rank could not be brought back into order.
        """
        hooks, parts = self._subject.hooks, self._parts
        args, kwargs = self._call.args, self._call.kwargs
        arguments = config.arguments()
        if hooks.prepare is not None:
            prepare = hooks.prepare
            failure = self._vote(
                f"prepare {label}", "compile", lambda: prepare(*args, **kwargs, **arguments)
            )
            if failure is not None:
                return failure

        measured: list[Measurement] = []
        failure = self._vote(f"run {label}", "launch", lambda: self._first_run(arguments))
        if failure is None:
            failure = self._vote(
                f"measure {label}", "launch", lambda: measured.append(self._measure(arguments))
            )
        if failure is not None:
            self._recover(config, label)
            return failure
        (own,) = measured
        slowest = parts.ranks.maximum(f"slowest rank of {label}", own.samples)
        return Measurement(tuple(slowest), own.warmup, "maximum")

    def _vote(self, phase: str, kind: FailureKind, step: Callable[[], object]) -> Failure | None:
        """Take ``step``; the failure of the lowest rank on which it failed, on every rank."""
        own: Failure | None = None
        try:
            step()
        except _LOST_RANKS:
            raise
        except Exception as error:
            own = _failure(error, kind, self._parts.ranks.rank)
        votes = self._parts.ranks.gather(phase, own)
        return next((vote for vote in votes if vote is not None), None)

    def _first_run(self, arguments: dict[str, Any]) -> None:
        """One run to the end: compiles what is not compiled, and gives the output to check.

        The first config that runs is the reference of all others. Its output is copied, because a
        function may return the same buffer each time.
        """
        hooks = self._subject.hooks
        self._reset()
        output = self._subject.function(*self._call.args, **self._call.kwargs, **arguments)
        self._parts.device.synchronize(self._parts.seconds)
        if hooks.check is None:
            return
        if self._reference is None:
            self._reference = (copy.deepcopy(output),)
        try:
            verdict = hooks.check(output, self._reference[0])
        except _LOST_RANKS:
            raise
        except Exception as error:
            raise _WrongResult(_text(error)) from error
        if verdict is not None and not verdict:
            raise _WrongResult("check_fn rejected its output")

    def _measure(self, arguments: dict[str, Any]) -> Measurement:
        function, args, kwargs = self._subject.function, self._call.args, self._call.kwargs
        reset_failure: Exception | None = None

        def align() -> None:
            nonlocal reset_failure
            try:
                self._reset()
            except _LOST_RANKS:
                raise
            except (
                Exception
            ) as error:  # the other ranks align now: so does this one, and fails then
                reset_failure = error
            self._parts.ranks.align()

        def run() -> None:
            if reset_failure is not None:
                raise reset_failure
            function(*args, **kwargs, **arguments)

        return self._parts.benchmarker.measure(run, self._parts.policy, align)

    def _reset(self) -> None:
        if self._subject.hooks.reset is not None:
            self._subject.hooks.reset(*self._call.args, **self._call.kwargs)

    def _recover(self, config: Config, label: str) -> None:
        """Bring all ranks back into order after a failure that may have launched on some of
        them."""
        own: str | None = None
        try:
            if self._subject.hooks.recover is not None:
                self._subject.hooks.recover(*self._call.args, **self._call.kwargs)
            self._parts.device.synchronize(self._parts.seconds)
        except _LOST_RANKS:
            raise
        except Exception as error:
            own = _text(error)
        votes = self._parts.ranks.gather(f"recover after {label}", own)
        causes = {rank: cause for rank, cause in enumerate(votes) if cause is not None}
        if causes:
            raise TuningAborted(self._subject.name, config, causes)


def _failure(error: Exception, kind: FailureKind, rank: int) -> Failure:
    if isinstance(error, _WrongResult):
        return Failure("wrong_result", str(error), rank)
    known = (_KINDS[base.__name__] for base in type(error).__mro__ if base.__name__ in _KINDS)
    return Failure(next(known, kind), _text(error), rank)


def _text(error: Exception) -> str:
    """Type and message; the middle of a very long one, such as a compiler's output, is left out."""
    message = f"{type(error).__name__}: {error}"
    return message if len(message) <= 1000 else f"{message[:500]} ... {message[-500:]}"
