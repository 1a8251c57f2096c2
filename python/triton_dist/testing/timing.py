"""Time candidates and baselines interleaved in one run; a sample is the slowest rank's time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

_CALL_SECONDS = 60.0
"""Time limit of the last call before a capture."""


@dataclass(frozen=True)
class Samples:
    """Milliseconds of the slowest rank, one value per round of ``time_interleaved``."""

    milliseconds: tuple[float, ...]

    def divided_by(self, number: int) -> Samples:
        """Return samples per call, for samples that each timed ``number`` calls."""
        return Samples(tuple(each / number for each in self.milliseconds))

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile."""
        first, _, third = statistics.quantiles(self.milliseconds, n=4)
        return first, third

    def quantile(self, share: float) -> float:
        """Return the interpolated quantile ``share`` of the samples; 0.5 is the median."""
        return float(torch.tensor(self.milliseconds, dtype=torch.float64).quantile(share))


def time_interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    warmup_rounds: int = 3,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Samples]:
    """Time each candidate once per round, so that clock and power drift affect all equally.

    Before each sample, ranks flush the L2 cache and wait for each other. Collective over ``group``.

    Args:
        candidates: calls by name.
        rounds: number of samples per candidate.
        warmup_rounds: rounds before the first sample.
        group: process group; default: the world.

    Raises:
        InvalidArgument: ``rounds`` is below 1.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise InvalidArgument("interleaved", "rounds", rounds, "an int, 1 or more")
    device, ranks = current_device(), group_for(group)
    device.flush_cache()  # allocate its memory before ranks wait for each other
    milliseconds: dict[str, list[float]] = {name: [] for name in candidates}
    queueing = 0.0  # longest host time of a call, in seconds

    for round_number in range(warmup_rounds + rounds):
        for name, call in candidates.items():
            timer = device.timer()
            ranks.barrier("interleaved timing")
            device.flush_cache()
            device.delay_stream(queueing)
            ranks.device_barrier()
            timer.start()
            began = time.perf_counter()
            call()
            queueing = max(queueing, time.perf_counter() - began)
            timer.stop()
            device.synchronize()
            if round_number >= warmup_rounds:
                milliseconds[name].append(timer.milliseconds())
    own = [sample for samples in milliseconds.values() for sample in samples]
    everyone = ranks.all_gather("interleaved timing", own)
    slowest = [max(times) for times in zip(*everyone, strict=True)]
    return {
        name: Samples(tuple(slowest[i * rounds : (i + 1) * rounds]))
        for i, name in enumerate(candidates)
    }


def capture_graph(call: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
    """Return the replay of a CUDA graph of ``call``; on CPU ranks, return ``call``.

    All ranks must capture the call, and must make equal numbers of replays.

    Args:
        call: the call to capture.
        warmup: number of calls before the capture.
    """
    device = current_device()
    if device.interprets:
        return call
    for _ in range(warmup - 1):
        call()
    return device.capture(call, _CALL_SECONDS)  # runs the call once more before the capture
