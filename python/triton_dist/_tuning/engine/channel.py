"""Exchange messages between the ranks during one tuning, and measure the time of each phase.

If a rank sends no message, every waiting rank raises :class:`TuningTimeout` with the step, the
config and the missing rank. If no other reason is known, the missing rank is assumed to be stuck in
the config that is being tried. The config is quarantined: it is not tried at the next start.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from triton_dist._tuning.engine.watchdog import Watch, watchdog
from triton_dist._tuning.protocols import RankGroup
from triton_dist._tuning.values import Config, Failure
from triton_dist.errors import RankDisagreement, RankTimeout, TuningTimeout

Phase = Literal["compile", "measure", "search", "agree"]


class Clock:
    """Seconds by phase. The time of a phase inside another phase counts for the outer phase.

    ``compile``: until a candidate is ready to run on all ranks. ``measure``: runs and samples,
    including the waits before each of them. ``search``: the choice of the next config on rank 0.
    ``agree``: all other waits for ranks.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._running = False

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        if self._running:
            yield
            return
        self._running, begin = True, time.monotonic()
        try:
            yield
        finally:
            self._running = False
            self.seconds[name] += time.monotonic() - begin


def timestamp() -> str:
    """Return the current time as it is recorded: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """A step of a tuning that ends with a message, described for error messages."""

    phase: str
    """What the ranks do in this step, such as ``compile 3/96``."""
    config: Config | None = None
    remark: str = ""
    """Further text for the error of this rank, such as its own failure in this step."""

    def __str__(self) -> str:
        """Return a text that is equal on all ranks in this step. Ranks compare it."""
        return self.phase if self.config is None else f"{self.phase} {self.config}"


class Channel:
    """Messages between all of ``ranks`` for one tuning.

    Args:
        seconds: time limit of a message, and of user code by default.
        grace_seconds: seconds after user code exceeded its time limit, until its process is ended.
        hint: possible reason why other ranks do not send the first message.

    Attributes:
        clock: the seconds of each phase.
        all_have_joined: whether all ranks have sent the first message.
        final_error: the error that ended the exchange of messages. Code that catches exceptions of
            the user's function must re-raise it, because no more messages can be sent.
        on_stuck: called with a config in which some rank is stuck, and the failure. Any thread may
            call it.
    """

    def __init__(
        self,
        ranks: RankGroup,
        function: str,
        seconds: float,
        grace_seconds: float,
        key: str = "",
        call: int = 0,
        hint: str = "",
    ) -> None:
        self._ranks = ranks.channel(function, key, call, hint)
        self._hint = hint
        self.all_have_joined = False
        self._is_nested = watchdog.is_inside()
        self._function = function
        self._seconds, self._grace_seconds = seconds, grace_seconds
        self.rank, self.size, self.is_leader = ranks.rank, ranks.size, ranks.is_leader
        self.clock = Clock()
        self.on_stuck: Callable[[Config, Failure], object] | None = None
        self.final_error: Exception | None = None

    def global_rank(self, rank: int) -> int:
        """Return the global rank, for messages, errors and records."""
        return self._ranks.global_rank(rank)

    def first_all_gather(self, step: Step, value: T, expected_soon: bool = False) -> list[T]:
        """Gather ``value`` from all ranks as the first message.

        If all ranks agreed to send it soon (``expected_soon``), wait for at most ``seconds``.
        """
        # Inside a trial of another tuned function, a rank whose trial failed sends no message here.
        # It reports the failure at the end of the trial's step, so a longer wait is useless.
        limit = self._seconds if self._is_nested or expected_soon else None
        values = self._exchange(step, lambda: self._ranks.first_all_gather(str(step), value, limit))
        self.all_have_joined = True
        return values

    def broadcast(self, step: Step, value: T | None, user_seconds: float = 0.0) -> T:
        """Return rank 0's value. User code before this message may take ``user_seconds``."""
        limit = self._limit(user_seconds)
        return self._exchange(step, lambda: self._ranks.broadcast(str(step), value, limit))

    def all_gather(self, step: Step, value: T, user_seconds: float = 0.0) -> list[T]:
        """Return all ranks' values. User code before this message may take ``user_seconds``."""
        limit = self._limit(user_seconds)
        return self._exchange(step, lambda: self._ranks.all_gather(str(step), value, limit))

    def device_barrier(self) -> None:
        """Make the devices of all ranks start the next work together, after an ``all_gather``."""
        self._ranks.device_barrier()

    def record_final_error(self, error: Exception) -> Exception:
        """Store the error that all ranks raise and that ends the exchange. Return ``error``."""
        self.final_error = error
        return error

    def quarantine(self, config: Config, failure: Failure) -> None:
        """Exclude ``config`` from the next start. Any thread may call this."""
        if self.on_stuck is not None:  # ``None``: no config was tried yet
            self.on_stuck(config, failure)

    def drop_errors(self) -> None:
        """Drop errors, whose frames refer to this object and to the arguments of the user's
        call."""
        self.final_error = self.on_stuck = None

    def abort(self, error: BaseException) -> None:
        """Report ``error`` to the other ranks, so that they do not wait for this rank."""
        summary = error.summary if isinstance(error, TuningTimeout) else error
        text = f"{type(error).__name__}: {summary}"
        # The other ranks raise these errors by themselves.
        raised_everywhere = isinstance(error, (RankTimeout, RankDisagreement))
        refused = (
            not self.all_have_joined and isinstance(error, Exception) and not raised_everywhere
        )
        with suppress(RankTimeout):
            self._ranks.abort(text if len(text) <= 500 else f"{text[:500]} ...", refused)

    @contextmanager
    def user_code(
        self, step: Step, seconds: float | None = None, start_now: bool = True
    ) -> Iterator[Watch]:
        """Context manager that limits the time of user code to ``seconds``.

        With ``start_now``, all code inside is user code. Otherwise, user code runs between
        ``begin`` and ``end`` of the yielded watch. User code that exceeds the limit is reported as
        stuck. If it returns within ``grace_seconds`` more, raise ``TimeoutError``; else end the
        process.
        """
        limit = self._seconds if seconds is None else seconds
        stuck = functools.partial(self.stuck_error, step, limit, "is stuck in the user's code")
        with watchdog.watching(limit, self._grace_seconds, stuck, self.abort) as watch:
            if start_now:
                watch.begin()
            yield watch
        if watch.is_overdue:
            raise TimeoutError(f"{step.phase} took longer than {limit:g} s")

    def blamed_config(self, step: Step) -> Config | None:
        """Return the config that is assumed to be the cause if a rank is stuck in ``step``."""
        return step.config

    def stuck_error(self, step: Step, seconds: float, state: str) -> TuningTimeout:
        """Return the error for this rank, which is stuck in user code. Quarantine the config.

        If other ranks failed, ended or are stopped, this rank may wait for them in a collective.
        The error then names these ranks first.
        """
        this_rank, because = self.global_rank(self.rank), self._failed_ranks()
        missing = list(because) or [this_rank]
        because[this_rank] = f"{state}, where it may wait for the others" if because else state
        return self._tuning_timeout(step, missing, seconds, because, blames_config=True)

    def _failed_ranks(self) -> dict[int, str]:
        """Return the other ranks that failed or cannot send a message, with the reasons."""
        values, because = self._ranks.pending_values()
        reasons = dict(because)
        for rank, value in values.items():
            if isinstance(value, Failure):
                reasons[rank] = f"failed: {value.message}"
        return {self.global_rank(rank): why for rank, why in sorted(reasons.items())}

    def _exchange(self, step: Step, message: Callable[[], T]) -> T:
        try:
            with self.clock.phase("agree"):
                return message()
        except RankDisagreement as error:
            self.final_error = error
            raise
        except RankTimeout as error:
            timeout = error
        # Raise outside of the ``except`` block, so that the traceback does not show ``timeout``. If
        # the caller handles another exception, the traceback shows that exception.
        try:
            raise self.record_final_error(self._timeout_error(step, timeout))
        finally:
            del timeout  # it refers to this frame

    def _timeout_error(self, step: Step, timeout: RankTimeout) -> Exception:
        """Return the error for a message that some rank did not send."""
        if timeout.refusals:
            ranks = [self.global_rank(rank) for rank in range(self.size)]
            by_rank = {r: "has not called yet" if r in timeout.missing else "valid" for r in ranks}
            by_rank |= timeout.refusals
            return RankDisagreement(f"the arguments of {self._function}", by_rank)
        # The hint explains only a missing first message.
        if not (self.all_have_joined or timeout.because):
            step = replace(step, remark=self._hint)
        # Without another reason, assume that the missing rank is stuck in the config.
        blames = bool(timeout.missing) and not timeout.because
        return self._tuning_timeout(step, timeout.missing, timeout.seconds, timeout.because, blames)

    def _tuning_timeout(
        self,
        step: Step,
        missing: Sequence[int],
        seconds: float,
        because: Mapping[int, str],
        blames_config: bool,
    ) -> TuningTimeout:
        """Return the error for missing ranks. With ``blames_config``, quarantine the config that is
        being tried."""
        config = self.blamed_config(step)
        error = TuningTimeout(
            rank=self.global_rank(self.rank),
            function=self._function,
            phase=step.phase,
            config=config,
            missing=missing,
            seconds=seconds,
            because=because,
            remark=step.remark,
            is_first_message=not self.all_have_joined and config is None,
        )
        if blames_config and config is not None:
            self.quarantine(config, Failure("timeout", error.summary, int(missing[0])))
        return error

    def _limit(self, user_seconds: float) -> float:
        """Return the time limit of a message. After user code, it includes the grace time."""
        return user_seconds + self._grace_seconds if user_seconds else self._seconds
