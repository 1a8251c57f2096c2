"""One tuning: call the function repeatedly. Each call runs one config of every kernel.

The ranks exchange messages at points that all of them reach: when a kernel has a new key, before
the launch of a config that must be compiled, and at the end of each call. The last message has the
steps, failures and times of the call.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from triton_dist._tuning.engine.channel import Step
from triton_dist._tuning.engine.contextual.context import (
    Context,
    ContextualParts,
    Messages,
    open_context,
    shown,
    triton_key,
)
from triton_dist._tuning.engine.contextual.interception import Interception
from triton_dist._tuning.engine.contextual.launch import Launch, keeps_own_table
from triton_dist._tuning.engine.contextual.tuning_call import StepReport, TuningCall
from triton_dist._tuning.engine.report import warn_of_failures
from triton_dist._tuning.engine.trial import failure_of, text_of
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

Contexts = MutableMapping[tuple[Any, tuple[Any, ...]], Context]
"""Contexts of one decorated function, by kernel and Triton's key, in order of creation."""

_MAX_UNTUNED_KEYS = 8
_MAX_SLOWDOWN = 3.0
"""Time limit of a call as a multiple of the previous call: a training step may be long."""


class Session:
    """Tuning of the kernels in ``contexts``, and of new kernels, until a call has no step to take.

    It is a context manager around the calls. An exception undoes the last call and drops the
    unfinished contexts.
    """

    def __init__(
        self,
        function: str,
        contexts: Contexts,
        parts: ContextualParts,
        interception: Interception,
        random_state: RandomState,
    ) -> None:
        self.random_state = random_state
        self._contexts, self._parts = contexts, parts
        self._interception = interception
        self._messages = Messages(parts, function, lambda: self._current_call.unfinished_config())
        self._current_call = self._next_call(0)
        self._check_results: Callable[[], None] = lambda: None
        self._scope = ExitStack()
        self._began = self._call_began = time.monotonic()

    @property
    def calls(self) -> int:
        """Number of calls of the function."""
        return self._current_call.number + 1

    def __enter__(self) -> Session:
        self._scope.callback(self._parts.log.close)
        self._scope.enter_context(self._parts.trial_context())
        self._interception.begin(self)
        self._scope.callback(self._interception.end, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        for place, context in list(self._contexts.items()):
            if context.is_untuned_default or (kind is not None and context.winner is None):
                del self._contexts[place]
            context.close(error)
        if error is not None:
            self._messages.abort(error)
        with self._scope:
            if kind is not None:
                self._undo()
        # Errors refer to frames, which refer to the arguments of the function and to this session.
        self._messages.end()
        self._current_call.no_config_left, self._check_results = None, lambda: None

    def run(self, call: Callable[[], Any]) -> Any:
        """Call the function until nothing is left to tune. Return the result of the last call."""
        # Checks are deferred here and not in ``__enter__``: they need the caller's thread, and
        # ``__enter__`` may run on an autograd thread.
        with self._parts.deferred_checks() as self._check_results:
            while True:
                self._call_began = time.monotonic()
                try:
                    step = Step(f"call {self._current_call.number}")
                    with self._messages.user_code(step, self._messages.limit):
                        result = call()
                except Exception as error:
                    self.fail_call(error)
                    raise
                if self.end_call():
                    return result

    def launch(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Launch a kernel in place of ``tuner.run``."""
        key = triton_key(tuner, args, kwargs)
        context = self._contexts.get((tuner, key))
        launch = Launch(tuner, args, kwargs, self._current_call.undo)
        if context is None:
            # One rank alone may use a config that Triton has tuned outside of this function.
            if self._parts.ranks.size == 1 and not keeps_own_table(tuner) and key in tuner.cache:
                return launch.run_known_config(tuner.cache[key])
            prune = functools.partial(self._interception.prune, tuner, args, kwargs)
            parts, messages, number = self._parts, self._messages, self._current_call.number
            context = open_context(tuner, key, prune, parts, messages, number)
            why = self._current_call.why_unusable(context, launch) if context.recorded else ""
            if why:  # some rank cannot use the recorded winner
                if parts.ranks.is_leader:
                    warn(
                        f"contextual_autotune {context.name}: {context.recorded} fails {why}. The "
                        "kernel is tuned again",
                        TuningWarning,
                    )
                parts = replace(parts, settings=replace(parts.settings, always_tune=True))
                context = open_context(tuner, key, prune, parts, messages, number)
            self._contexts[tuner, key] = context
            self._current_call.has_new_key = True
        return self._current_call.launch(context, launch)

    def end_call(self) -> bool:
        """Exchange the results of the call. Return whether it was the last call."""
        if self._messages.final_error is not None:  # the function caught and ignored it
            raise self._messages.final_error
        current_call = self._current_call
        ending = Step(f"end of call {current_call.number}")
        try:
            self._check_results()
            current_call.read_timers()
        except Exception as error:
            if isinstance(error, TimeoutError) and not isinstance(error, WaitTimeout):
                how = "its device has not finished"
                raise self._messages.record_final_error(
                    self._messages.stuck(ending, self._messages.limit, how)
                ) from error
            self.fail_call(error)
            raise
        everyone = self._messages.all_gather(ending, list(current_call.steps.values()))
        positions = [[(s.context, s.digest, s.iteration) for s in steps] for steps in everyone]
        if any(each != positions[0] for each in positions):
            names_of_steps = [
                [f"{each.context} iter {each.iteration}" for each in steps] for steps in everyone
            ]
            by_rank = {
                self._messages.global_rank(rank): "; ".join(steps) or "none"
                for rank, steps in enumerate(names_of_steps)
            }
            what = f"the kernels launched in call {current_call.number}"
            raise self._messages.record_final_error(RankDisagreement(what, by_rank))
        for context, *steps in zip(current_call.steps, *everyone, strict=True):
            # Record one step: the slowest rank counts, and a failure on any rank.
            own, digest = steps[self._parts.ranks.rank], steps[0].digest
            self._parts.log.line(step_line(self._current_call.number, context, own))
            failures: dict[str, Failure] = {}
            for stepped in steps:
                failures = stepped.failures | failures  # keep the failure of the lowest rank
            if digest not in failures:
                slowest = max(stepped.milliseconds for stepped in steps)
                context.tell(digest, slowest, self._reduction)
            for failed, failure in failures.items():
                context.fail(failed, failure)
            if context.plan.current is None:
                self._finish(context)
        if not current_call.steps or self._never_ends():
            current_call.undo.pop_all()  # do not undo the last call
            if current_call.number:
                tuned = [context for context in self._contexts.values() if context.record]
                self._parts.log.report(summary(tuned, self.calls, time.monotonic() - self._began))
            return True
        self._undo()
        self.random_state.rewind()
        self._current_call = self._next_call(current_call.number + 1)
        return False

    def fail_call(self, error: Exception) -> None:
        """Report to the other ranks that the function raised ``error`` on this rank."""
        if self._messages.final_error is not None:  # the other ranks have the error
            return
        if error is self._current_call.no_config_left:
            # All configs failed on this rank. Other ranks may run them, and receive the failures of
            # this rank at the end of their call.
            with suppress(Exception):
                self.end_call()
            return
        if not self._messages.all_have_joined:  # ``__exit__`` reports the error
            self._messages.record_final_error(error)
            return
        ending = Step(f"end of call {self._current_call.number}, which raised {text_of(error)}")
        own = failure_of(error, "launch", int(self._messages.global_rank(self._messages.rank)))
        # Ranks that raised no error, or another one, raise an error that names this rank.
        with suppress(RankTimeout, RankDisagreement):
            self._messages.all_gather(ending, own)
        self._messages.record_final_error(error)

    def _finish(self, context: Context) -> None:
        """Choose the winner of ``context``, because all its configs are measured on all ranks."""
        parts = self._parts
        try:
            record = context.finish(self._reduction)
        except NoValidConfig as error:
            context.close(None)  # the next start tries failed configs again
            self._messages.record_final_error(error)
            raise
        context.publish()
        if not parts.ranks.is_leader:
            where = "the leader's store"
        elif context.can_persist:
            where = parts.store.put(record) or "memory"
            if parts.remote is not None:
                parts.remote.publish(record)
        else:
            where = "memory"
        context.close(None)
        parts.log.report(f"{context.name}: best is {shown(context.winner)}; kept in {where}")
        if parts.ranks.is_leader:
            title = f"contextual_autotune {context.name}"
            warn_of_failures(title, record, "the log of each rank lists them")

    def _never_ends(self) -> bool:
        """Return whether each call launches a new key and no call repeats an earlier key."""
        stepped = self._current_call.steps
        left = [c for c in self._contexts.values() if c.winner is None and c not in stepped]
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
        with self._parts.no_grad():
            self._current_call.undo.close()

    @property
    def _reduction(self) -> Reduction:
        return "maximum" if self._parts.ranks.size > 1 else "none"

    def _next_call(self, number: int) -> TuningCall:
        if number:
            took = time.monotonic() - self._call_began
            self._messages.limit = max(self._parts.settings.seconds, _MAX_SLOWDOWN * took)
        return TuningCall(number, self._parts, self._messages, self._finish)


def step_line(call: int, context: Context, stepped: StepReport) -> str:
    """Return the log line about one step of this rank."""
    took = f"{stepped.milliseconds:.4f} ms" if stepped.timed else "warm-up"
    failed = "; ".join(map(str, stepped.failures.values()))
    config = shown(context.triton_configs[stepped.digest])
    return f"call {call} {context.name} config {config} iter {stepped.iteration}: {failed or took}"


def summary(tuned: Sequence[Context], calls: int, seconds: float) -> str:
    """Return a table of the chosen configs."""
    rows = [f"{calls} calls of the function, {seconds:.1f} s"]
    for context in tuned:
        best = context.record.best.outcome if context.record else None
        took = f"{best.median:10.4f} ms" if isinstance(best, Measurement) else ""
        of = f"{len(context.candidates):3} configs"
        rows.append(f"  {took}  {of}  {context.name}  {shown(context.winner)}")
    return "\n".join(rows)
