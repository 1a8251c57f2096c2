"""Timing the runs of one candidate, each by itself, with the device's own timer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.engine.watchdog import Watch
from triton_dist._tuning.protocols import Device, Timer
from triton_dist._tuning.values import Config, Policy

# How much of what queueing took counts for the next run of the same config: one hiccup of the host
# is not to hold the device in all runs that follow.
_REMEMBERED = 0.9
# Seconds that a device is held for the first sample of a config, at most.
_LONGEST_FIRST = 1e-3


class Sampler:
    """Runs a call again and again, cache cold, all ranks starting together.

    Args:
        device: where the work runs.
        seconds: longest time to wait for other ranks, and for the device after all was queued.
        settle: called after each run, untimed; raises if a wait in a kernel gave up.
    """

    def __init__(
        self,
        device: Device,
        ranks: Conversation,
        policy: Policy,
        seconds: float,
        settle: Callable[[], object],
    ) -> None:
        self._device, self._ranks, self._policy, self._seconds = device, ranks, policy, seconds
        self._settle = settle
        self._queueing: dict[str, float] = {}
        """Seconds that the host lately needed to queue a call, by digest of the config."""

    def queued(self, config: Config, seconds: float) -> None:
        """Learn how long the host needed to queue the first run of a config, which is long for what
        is loaded then. So already its first sample shows the device's time and not the host's."""
        self._queueing.setdefault(config.digest, min(seconds, _LONGEST_FIRST))

    def sample(
        self, at: Situation, call: Callable[[], Any], number: int, reset: Callable[[], object]
    ) -> tuple[float, ...]:
        """Milliseconds of ``number`` runs, after ``policy.warmup`` that do not count.

        Args:
            reset: called before each run, untimed; runs the user's code.

        A rank on which something fails still meets the others before each run: they expect it
        there. The exception comes after the last run.

        Raises:
            TimeoutError: the device did not finish in time.
            TuningTimeout, RankDisagreement: of another rank.
            Exception: of the call or of what surrounds it.
        """
        failure: Exception | None = None
        timers: list[Timer] = []
        # One watch for all runs, because setting one up takes longer than some functions.
        with self._ranks.user_code(at) as watch:
            for _ in range(self._policy.warmup + number):
                timers.append(self._device.timer())
                failure = failure or _failure_in(self._make_ready, watch, reset)
                self._ranks.gather(at, None, self._seconds)
                unheld = _failure_in(self._hold, at, failure is None)
                self._ranks.line_up()
                failure = failure or unheld or _failure_in(self._run, at, watch, timers[-1], call)
            if failure is not None:
                try:
                    raise failure
                finally:
                    failure = unheld = None  # the error holds this frame
            self._device.synchronize(self._seconds)
            # To the nanosecond: what no timer resolves would only make the record hard to read.
            times = (round(timer.milliseconds(), 6) for timer in timers[self._policy.warmup :])
            samples = tuple(times)
            self._settle()  # the last run
        return samples

    def _make_ready(self, watch: Watch, reset: Callable[[], object]) -> None:
        self._settle()  # the run before
        watch.begin()
        try:
            reset()
        finally:
            watch.end()

    def _hold(self, at: Situation, flush: bool) -> None:
        """Keep the device busy until the host has queued a call; a rank that failed does too."""
        if flush and self._policy.flush:
            self._device.flush_cache()
        self._device.hold(self._queueing.get(_name(at), 0.0))

    def _run(self, at: Situation, watch: Watch, timer: Timer, call: Callable[[], Any]) -> None:
        timer.start()
        began = time.perf_counter()
        watch.begin()
        try:
            call()
        finally:
            watch.end()
        took = time.perf_counter() - began
        self._queueing[_name(at)] = max(took, _REMEMBERED * self._queueing.get(_name(at), 0.0))
        timer.stop()


def _name(at: Situation) -> str:
    return "" if at.config is None else at.config.digest


def _failure_in(step: Callable[..., object], *args: Any) -> Exception | None:
    try:
        step(*args)
    except Exception as error:
        return error
    return None
