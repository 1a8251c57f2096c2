"""The winner of several outcomes: one rule, for the record and for every search."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from triton_dist._tuning.values.outcome import Measurement, Outcome

_STANDARD_ERRORS = 2.0
_LEAST_SHARE = 0.25


def winner(outcomes: Sequence[Outcome], indifference: float) -> int | None:
    """Index of the outcome that wins; ``None`` if all are failures.

    The earliest that is within ``indifference`` of the lowest median even if noise flatters it: the
    zone is narrowed by two standard errors of the difference of two medians, to no less than a
    quarter. So the winner is truly within ``indifference`` of the best, and yet rarely another one
    in the next tuning. (Replayed on recorded spaces, a zone that is not narrowed adds half of it to
    the 95th percentile of regret, and makes the winner no steadier: its edge is as noisy.)

    A search that drops losers early leaves some with few samples. Those with fewer than half as
    many as the most measured one do not count: their median says little, and the search had its
    reason to drop them.

    Args:
        outcomes: in the order of the config space, whose author put the preferred ones first.
        indifference: a relative difference in time that nobody minds, such as 0.01; 0 for none.

    Raises:
        ValueError: ``indifference`` is not in [0, 1).
    """
    if not 0 <= indifference < 1:
        raise ValueError(f"indifference is {indifference}, expected a number in [0, 1)")
    most = max((len(each.samples) for each in outcomes if isinstance(each, Measurement)), default=0)
    medians = {
        index: each.median
        for index, each in enumerate(outcomes)
        if isinstance(each, Measurement) and 2 * len(each.samples) >= most
    }
    if not medians:
        return None
    lowest = min(medians.values())
    scale = abs(lowest)  # a clock that was set back makes a time less than nothing

    def near_by(zone: float) -> dict[int, float]:
        return {i: median for i, median in medians.items() if median <= lowest + scale * zone}

    near = near_by(indifference)
    noise = _STANDARD_ERRORS * _standard_error(outcomes[index] for index in near)
    zone = max(indifference - noise, indifference * _LEAST_SHARE)
    return min(near_by(zone))


def _standard_error(measurements: Iterable[Outcome]) -> float:
    """Noise of the difference of two medians, relative to either; 0 if single samples do not tell.

    The median's is 1.25 times that of the mean.
    """
    each = [
        1.25 * statistics.stdev(m.samples) / (abs(m.median) or 1.0) * math.sqrt(2 / len(m.samples))
        for m in measurements
        if isinstance(m, Measurement) and len(m.samples) > 1
    ]
    return statistics.median(each) if each else 0.0
