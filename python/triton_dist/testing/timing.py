"""Fair timing: candidates and peers interleaved in one run, the slowest rank of each sample."""

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

_SECONDS = 60.0
"""Longest that a call may take before it is captured."""


@dataclass(frozen=True)
class Samples:
    """Milliseconds of the slowest rank, one for each round."""

    milliseconds: tuple[float, ...]

    def divided_by(self, number: int) -> Samples:
        """Those of one of ``number`` calls that were timed together."""
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
        """The sample that ``share`` of all lie below, interpolated; 0.5: the median."""
        return float(torch.tensor(self.milliseconds, dtype=torch.float64).quantile(share))


def interleaved(
    candidates: Mapping[str, Callable[[], Any]],
    rounds: int = 15,
    warmup_rounds: int = 3,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Samples]:
    """Time each candidate once a round, in turn, so that drift of clocks and power hits all alike.

    Before each sample the cache is flushed and the ranks are lined up. Collective over ``group``.

    Raises:
        InvalidArgument: ``rounds`` is below 1.
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise InvalidArgument("interleaved", "rounds", rounds, "an int, 1 or more")
    device, ranks = current_device(), group_for(group)
    device.flush_cache()  # what it needs is allocated before ranks wait for one another
    own: dict[str, list[float]] = {name: [] for name in candidates}
    queueing = 0.0  # the longest that it took the host to queue a call

    def hold() -> None:
        device.flush_cache()
        device.hold(queueing)

    for round_number in range(warmup_rounds + rounds):
        for name, call in candidates.items():
            timer = device.timer()
            ranks.align("interleaved timing", hold=hold)
            timer.start()
            began = time.perf_counter()
            call()
            queueing = max(queueing, time.perf_counter() - began)
            timer.stop()
            device.synchronize()
            if round_number >= warmup_rounds:
                own[name].append(timer.milliseconds())
    slowest = ranks.maximum("interleaved timing", [t for times in own.values() for t in times])
    return {
        name: Samples(tuple(slowest[i * rounds : (i + 1) * rounds]))
        for i, name in enumerate(candidates)
    }


def captured(call: Callable[[], Any], warmup: int = 3) -> Callable[[], Any]:
    """``call`` captured in a CUDA graph: its replay. On CPU ranks ``call`` itself.

    All ranks must capture, and replay equally often.
    """
    device = current_device()
    if device.interprets:
        return call
    for _ in range(warmup - 1):
        call()
    return device.capture(call, _SECONDS)  # which runs it once more
