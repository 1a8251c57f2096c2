"""The winner of several outcomes: one rule, for the record and for every search.

Clocks and temperature drift while candidates are measured, by more than candidates differ. A search
that measures them in turn takes the n-th sample of each at about the same time, in the n-th *lap*.
What the samples of a lap have in common is caused by the device; it is estimated and removed. Where
samples were not taken in turn, laps have nothing in common, and nothing is removed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from triton_dist._tuning.values.outcome import Measurement, Outcome

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
            typical([time - round_ for time, round_ in zip(own, common, strict=False)])
            for own in samples
        ]
        if len(samples) == 1:
            break
        pairs = list(zip(samples, level, strict=True))
        common = [
            statistics.median(own[round_] - mine for own, mine in pairs if round_ < len(own))
            for round_ in range(len(common))
        ]
    left = [
        abs(time - round_ - mine)
        for own, mine in zip(samples, level, strict=True)
        for time, round_ in zip(own, common, strict=False)
    ]
    # Laps took their share of the differences; of two candidates, half.
    taken = len(samples) / max(len(samples) - 1, 1)
    return Levels(level, _DEVIATIONS * statistics.median(left) * math.sqrt(taken))


_CLOCKS = 0.1
"""Relative difference of medians that drifting clocks alone may make."""
_MOST = 16
"""So many of the fastest are compared lap by lap."""
_WIDTH = 0.5
"""Width of the zone, in standard errors of the difference of two candidates."""


def winner(outcomes: Sequence[Outcome], indifference: float) -> int | None:
    """Index of the outcome that wins; ``None`` if all are failures.

    The fastest by what its samples are without the drift that all have in common
    (:func:`~triton_dist._tuning.values.winner.levels`); of those that noise does not tell from it,
    the earliest. This zone is as wide as the noise, half a standard error of the difference, and
    never wider than ``indifference``: a difference that was measured is not given away, and one
    that was not decides nothing.

    A search that drops losers early leaves some with few samples. Those with fewer than half as
    many as the most measured one do not count: their times say little, and the search had its
    reason to drop them.

    Args:
        outcomes: in the order of the config space, whose author put the preferred ones first.
        indifference: a relative difference in time that nobody minds, such as 0.01; 0 for none.

    Raises:
        ValueError: ``indifference`` is not in [0, 1).
    """
    medians = _in_the_running(outcomes, indifference)
    if not medians:
        return None
    lowest = min(medians.values())
    limit = lowest + _CLOCKS * abs(lowest)  # a clock that was set back: less than nothing
    near = sorted(index for index, median in medians.items() if median <= limit)
    near = sorted(sorted(near, key=medians.__getitem__)[:_MOST])
    samples = [outcomes[index].samples for index in near]  # type: ignore[union-attr]
    found = levels(samples)
    first = min(range(len(near)), key=found.level.__getitem__)
    fastest, most = found.level[first], indifference * abs(found.level[first])
    for place, index in enumerate(near):
        zone = min(most, _WIDTH * found.doubt(len(samples[first]), len(samples[place])))
        if found.level[place] <= fastest + zone:
            return index
    raise AssertionError("the fastest is near itself")


def could_win(outcomes: Sequence[Outcome], index: int, indifference: float) -> bool:
    """True if earlier versions of :func:`winner` may have chosen ``outcomes[index]``: its median is
    within ``indifference`` of the lowest. Raises like it."""
    medians = _in_the_running(outcomes, indifference)
    if index not in medians:
        return False
    lowest = min(medians.values())
    return medians[index] <= lowest + indifference * abs(lowest)


def _in_the_running(outcomes: Sequence[Outcome], indifference: float) -> dict[int, float]:
    """Medians of those with enough samples to count, by index."""
    if not 0 <= indifference < 1:
        raise ValueError(f"indifference is {indifference}, expected a number in [0, 1)")
    most = max((len(each.samples) for each in outcomes if isinstance(each, Measurement)), default=0)
    return {
        index: each.median
        for index, each in enumerate(outcomes)
        if isinstance(each, Measurement) and 2 * len(each.samples) >= most
    }
