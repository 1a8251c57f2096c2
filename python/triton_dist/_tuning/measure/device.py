"""Measuring with the device's own timer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from triton_dist._tuning.protocols import Align, Device
from triton_dist._tuning.values import Measurement, Policy

# How much of what queueing took counts for the next run: candidates that take long to queue come
# one after another, but one hiccup of the host is not to hold the device in all runs that follow.
_REMEMBERED = 0.9


class DeviceBenchmarker:
    """Times each run by itself, cache cold, all ranks starting together.

    Args:
        device: where the work runs.
        seconds: longest time to wait for the device after all runs were queued.
    """

    def __init__(self, device: Device, seconds: float) -> None:
        self._device = device
        self._seconds = seconds
        self._queueing = 0.0  # seconds that the host lately needed to queue a call

    def measure(
        self, call: Callable[[], Any], policy: Policy, align: Align, samples: int
    ) -> Measurement:
        """``policy.warmup`` untimed, then ``samples`` timed runs; ``align`` before each.

        A rank whose ``call`` raises goes on to align, so that the others, which expect it at each
        of their runs, are not left waiting; the exception comes after the last run.

        Raises:
            TimeoutError: the device did not finish in time.
            Exception: what ``call`` or ``align`` raised.
        """
        failure: Exception | None = None
        timers = []

        def hold() -> None:
            nonlocal failure
            try:
                if failure is None and policy.flush:
                    self._device.flush_cache()
                self._device.hold(self._queueing)
            except Exception as error:
                failure = error

        for _ in range(policy.warmup + samples):
            timer = self._device.timer()
            align(hold)
            if failure is not None:
                continue
            try:
                timer.start()
                began = time.perf_counter()
                call()
                took = time.perf_counter() - began
                self._queueing = max(took, _REMEMBERED * self._queueing)
                timer.stop()
            except Exception as error:
                failure = error
            timers.append(timer)
        if failure is not None:
            raise failure
        self._device.synchronize(self._seconds)
        # To the nanosecond: what no timer resolves would only make the record hard to read.
        times = tuple(round(timer.milliseconds(), 6) for timer in timers[policy.warmup :])
        return Measurement(times, policy.warmup)
