"""Candidates that were measured in turn: what is the device's that day, and what is theirs.

Clocks and temperature drift while candidates are measured, by more than candidates differ. A
search that measures them in turn gives each its n-th sample at about the same time, in the n-th
*lap*, so what all have in common in a lap is no candidate's. It is estimated and taken out. Where
samples were not taken in turn, laps have nothing in common, and nothing is taken out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

_PASSES = 4
_DEVIATIONS = 1.4826  # median absolute deviations in a standard deviation


class Levels(NamedTuple):
    """Several candidates, each without what its laps have in common."""

    level: list[float]
    """Milliseconds of each in a typical lap."""
    noise: float
    """Standard deviation of a sample, milliseconds; that of most samples, whatever their tails."""

    def doubt(self, first: int, second: int) -> float:
        """Standard error of the difference of two levels, from so many samples each."""
        return self.noise * math.sqrt(1 / first + 1 / second)


def typical(samples: Sequence[float]) -> float:
    """Mean of the middle half.

    Three and more samples bear one that is late by any time, as a median does; of a device that is
    in either of two states, where a median jumps from one to the other, it is about the mean.
    """
    ordered, cut = sorted(samples), round(len(samples) / 4)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def levels(samples: Sequence[Sequence[float]]) -> Levels:
    """Level of each candidate from its ``samples``, the n-th of which was taken in lap n.

    Levels and laps are, in turn, what the other leaves of the samples.

    Args:
        samples: milliseconds, of candidates that are about as fast; at least one of each.
    """
    common = [0.0] * max(map(len, samples))
    for _ in range(_PASSES):
        level = [
            typical([time - lap for time, lap in zip(own, common, strict=False)]) for own in samples
        ]
        if len(samples) == 1:
            break
        pairs = list(zip(samples, level, strict=True))
        common = [
            statistics.median(own[lap] - mine for own, mine in pairs if lap < len(own))
            for lap in range(len(common))
        ]
    left = [
        abs(time - lap - mine)
        for own, mine in zip(samples, level, strict=True)
        for time, lap in zip(own, common, strict=False)
    ]
    # Laps took their share of the differences; of two candidates, half.
    taken = len(samples) / max(len(samples) - 1, 1)
    return Levels(level, _DEVIATIONS * statistics.median(left) * math.sqrt(taken))
