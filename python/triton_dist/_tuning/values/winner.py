"""Select the winner of several outcomes, with one rule for records and for all searches.

Clock and temperature drift during a measurement can exceed the differences between candidates. A
search that alternates between candidates takes the n-th sample of each at about the same time, in
the n-th *round*. The common deviation of all samples of a round is caused by the device, so it is
estimated and removed. Without alternation there is no common deviation, and nothing is removed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from triton_dist._tuning.values.outcome import Measurement, Outcome

_FIT_ITERATIONS = 4
_DEVIATIONS_PER_MAD = (
    1.4826  # standard deviation of a normal distribution / median absolute deviation
)


class Levels(NamedTuple):
    """Latencies of several candidates, without the common deviation of each round."""

    level: list[float]
    """Milliseconds of each candidate in a typical round."""
    noise: float
    """Robust standard deviation of a sample in milliseconds; outliers have little effect."""

    def standard_error(self, num_samples: int, other_num_samples: int) -> float:
        """Return the standard error of the difference of two levels, from their numbers of
        samples."""
        return self.noise * math.sqrt(1 / num_samples + 1 / other_num_samples)


def typical(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of the samples.

    Like the median, it ignores one outlier among three or more samples. If the device alternates
    between two states, it stays near the mean, while a median jumps between the states.
    """
    ordered, cut = sorted(samples), round(len(samples) / 4)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def levels(samples: Sequence[Sequence[float]]) -> Levels:
    """Estimate the level of each candidate and the common deviation of each round.

    Alternate between the two: levels are typical samples after subtracting the round deviations,
    and round deviations are medians after subtracting the levels.

    Args:
        samples: milliseconds of candidates of similar speed, at least one sample per candidate. The
            n-th sample was taken in round n.
    """
    round_drift = [0.0] * max(map(len, samples))
    for _ in range(_FIT_ITERATIONS):
        level = [
            typical([time - drift for time, drift in zip(own, round_drift, strict=False)])
            for own in samples
        ]
        if len(samples) == 1:
            break
        pairs = list(zip(samples, level, strict=True))
        round_drift = [
            statistics.median(
                own[place] - own_level for own, own_level in pairs if place < len(own)
            )
            for place in range(len(round_drift))
        ]
    residuals = [
        abs(time - drift - own_level)
        for own, own_level in zip(samples, level, strict=True)
        for time, drift in zip(own, round_drift, strict=False)
    ]
    # The round deviations absorb a share of the noise; with two candidates, half of it.
    absorbed = len(samples) / max(len(samples) - 1, 1)
    return Levels(level, _DEVIATIONS_PER_MAD * statistics.median(residuals) * math.sqrt(absorbed))


_MAX_DRIFT = 0.1
"""Relative difference of medians that clock drift alone can cause."""
_MAX_COMPARED = 16
"""Maximum number of fastest candidates that are compared round by round."""
_ZONE_WIDTH = 0.5
"""Width of the indifference zone, in standard errors of the difference of two candidates."""


def winner(outcomes: Sequence[Outcome], indifference: float) -> int | None:
    """Return the index of the winning outcome; ``None`` if all are failures.

    Drift is removed from the samples (:func:`~triton_dist._tuning.values.winner.levels`). The
    winner is the earliest outcome within a zone above the fastest level. The zone is half a
    standard error of the difference, and at most ``indifference``. Differences below the noise do
    not decide; the order of the space does.

    Outcomes with fewer than half of the maximum number of samples are ignored: the search
    eliminated them early, and their times are imprecise.

    Args:
        outcomes: outcomes in the order of the config space, preferred configs first.
        indifference: negligible relative difference in time, such as 0.01; 0 for none.

    Raises:
        ValueError: ``indifference`` is not in [0, 1).
    """
    medians = _well_sampled(outcomes, indifference)
    if not medians:
        return None
    lowest = min(medians.values())
    limit = lowest + _MAX_DRIFT * abs(lowest)  # abs: times are negative if a clock was set back
    near = sorted(index for index, median in medians.items() if median <= limit)
    near = sorted(sorted(near, key=medians.__getitem__)[:_MAX_COMPARED])
    samples = [outcomes[index].samples for index in near]  # type: ignore[union-attr]
    found = levels(samples)
    first = min(range(len(near)), key=found.level.__getitem__)
    fastest, max_zone = found.level[first], indifference * abs(found.level[first])
    for place, index in enumerate(near):
        zone = min(
            max_zone, _ZONE_WIDTH * found.standard_error(len(samples[first]), len(samples[place]))
        )
        if found.level[place] <= fastest + zone:
            return index
    raise AssertionError("the fastest is near itself")


def _well_sampled(outcomes: Sequence[Outcome], indifference: float) -> dict[int, float]:
    """Return the medians of the outcomes with enough samples, by index."""
    if not 0 <= indifference < 1:
        raise ValueError(f"indifference is {indifference}, expected a number in [0, 1)")
    max_samples = max(
        (len(each.samples) for each in outcomes if isinstance(each, Measurement)), default=0
    )
    return {
        index: each.median
        for index, each in enumerate(outcomes)
        if isinstance(each, Measurement) and 2 * len(each.samples) >= max_samples
    }
