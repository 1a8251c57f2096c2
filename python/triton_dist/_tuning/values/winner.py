"""Select the winner of several outcomes, with one rule for records and for all searches.

Drift of clocks and temperature during a measurement can exceed the differences between candidates.
A search that alternates between candidates takes the n-th sample of each candidate at about the
same time, in the n-th *round*. If the samples of all candidates deviate in a round, the device is
the cause. This common deviation is estimated and removed. Without alternation, the deviations of a
round have little in common, and little is removed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from triton_dist._tuning.values.outcome import Measurement, Outcome

_FIT_ITERATIONS = 4  # of the alternating estimate of levels and rounds
_DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution, divided by its median absolute deviation."""


class LatencyLevels(NamedTuple):
    """Latencies of several candidates, without the common deviation of each round."""

    ms: list[float]
    """Milliseconds of each candidate in a typical round."""
    noise: float
    """Estimated standard deviation of one sample in milliseconds; outliers have little effect."""

    def standard_error(self, num_samples: int, other_num_samples: int) -> float:
        """Return the standard error in ms of the difference of two levels."""
        return self.noise * math.sqrt(1 / num_samples + 1 / other_num_samples)


def interquartile_mean(samples: Sequence[float]) -> float:
    """Return the mean of the middle half of the samples (the interquartile mean).

    Like the median, this mean ignores one outlier among three or more samples. If the device
    alternates between two states, a median jumps from one state to the other, and this mean does
    not.
    """
    ordered, cut = sorted(samples), round(len(samples) / 4)
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def estimate_levels(samples: Sequence[Sequence[float]]) -> LatencyLevels:
    """Estimate the level of each candidate and the common deviation of each round.

    Repeat two steps. The level of a candidate is the typical sample after subtracting the
    deviations of the rounds. The deviation of a round is the median over the candidates after
    subtracting their levels.

    Args:
        samples: milliseconds of candidates of similar speed, at least one sample per candidate. The
            n-th sample was taken in round n.
    """
    round_drift = [0.0] * max(map(len, samples))
    for _ in range(_FIT_ITERATIONS):
        level = [
            interquartile_mean(
                [time - drift for time, drift in zip(each, round_drift, strict=False)]
            )
            for each in samples
        ]
        if len(samples) == 1:
            break
        pairs = list(zip(samples, level, strict=True))
        round_drift = [
            statistics.median(each[n] - each_level for each, each_level in pairs if n < len(each))
            for n in range(len(round_drift))
        ]
    residuals = [
        abs(time - drift - each_level)
        for each, each_level in zip(samples, level, strict=True)
        for time, drift in zip(each, round_drift, strict=False)
    ]
    # The deviations of the rounds absorb a share of the noise: with two candidates, half.
    absorbed = len(samples) / max(len(samples) - 1, 1)
    return LatencyLevels(
        level, _DEVIATIONS_PER_MAD * statistics.median(residuals) * math.sqrt(absorbed)
    )


_MAX_DRIFT = 0.1
"""Largest relative difference of two medians that clock drift alone can cause."""
_MAX_COMPARED = 16
"""Maximum number of candidates, the fastest, whose rounds are compared."""
_ZONE_WIDTH = 0.5
"""Width of the zone of equally good candidates, in standard errors of a difference of levels."""


def winner(outcomes: Sequence[Outcome], indifference: float) -> int | None:
    """Return the index of the winning outcome; ``None`` if all are failures.

    Drift is removed from the samples (:func:`estimate_levels`). The winner is the first outcome
    whose level lies within a zone above the fastest level. The zone is half a standard error of the
    difference, and at most ``indifference`` times the fastest level. Within the zone, the order of
    the config space decides.

    Outcomes with fewer than half as many samples as the outcome with the most are ignored: the
    search eliminated them early, and their times are imprecise.

    Args:
        outcomes: outcomes in the order of the config space, preferred configs first.
        indifference: relative difference of times that is negligible, such as 0.01. With 0, the
            fastest level wins.

    Raises:
        ValueError: ``indifference`` is not in [0, 1).
    """
    medians = _well_sampled(outcomes, indifference)
    if not medians:
        return None
    lowest = min(medians.values())
    limit = lowest + _MAX_DRIFT * abs(lowest)  # abs: times are negative if a clock was set back
    compared = sorted(index for index, median in medians.items() if median <= limit)
    compared = sorted(sorted(compared, key=medians.__getitem__)[:_MAX_COMPARED])
    samples = [outcomes[index].samples for index in compared]  # type: ignore[union-attr]
    fitted = estimate_levels(samples)
    fastest = min(range(len(compared)), key=fitted.ms.__getitem__)
    fastest_ms = fitted.ms[fastest]
    for each, index in enumerate(compared):
        error = fitted.standard_error(len(samples[fastest]), len(samples[each]))
        zone = min(indifference * abs(fastest_ms), _ZONE_WIDTH * error)
        if fitted.ms[each] <= fastest_ms + zone:
            return index
    raise AssertionError("the fastest is within the zone")


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
