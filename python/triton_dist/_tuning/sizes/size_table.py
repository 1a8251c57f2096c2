"""Choose the config for an exact size within a range of sizes that shares one tuning.

The time of a library grows with the size, because it selects tiles by the exact size. A kernel with
fixed tiles takes the same time for one row of a tile as for all. Hence the winner at the end of a
wide range may lose at its beginning.

The size table predicts the winner of each size without measurements. It assumes that a config of
``fallback_fn`` (a library) takes a time between its times at the two neighbouring measured sizes,
growing at most in proportion to the size. It assumes that the time of every other config is
constant.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.values import Config, ConfigSpace, Measurement, TuningRecord

_MAX_SHARE_TO_REPLACE_WINNER = 0.99
"""Near the measured size, another config replaces the winner only below this share of its time.
Elsewhere both times are predictions, and the faster one is chosen."""
_MAX_SHARE_OF_FIXED_TILES = 0.98
"""At other sizes, a config with fixed tiles is used only below this share of the fastest fallback's
time: some take longer for fewer rows of a tile (99 us for 33 rows, 92 us for 48)."""
_MAX_DISTANCE_OF_MEASURED = 1 / 64
"""Relative distance from the measured size within which measured times hold."""
_MAX_SLOPE_RATIO = 15 / 16
"""Largest ratio of two sizes from which a slope is extrapolated. Between closer sizes, a change of
the library's tiles distorts the slope (44 us per row instead of 0.4)."""


class LatencyCurve(NamedTuple):
    """Predicted milliseconds of a config as a function of the size."""

    digest: str
    size: int
    """The measured size."""
    ms: float
    slope_down: float
    slope_up: float
    """Fraction of the time that is proportional to the size, for smaller and for larger sizes."""

    def at(self, size: int) -> float:
        growth = self.slope_up if size > self.size else self.slope_down
        return self.ms * (1 + growth * (size / max(1, self.size) - 1))


class SizeTimes(NamedTuple):
    """Plain values that the leader broadcasts to all ranks."""

    winner: str
    """Digest of the winner."""
    fixed: tuple[str, float] | None
    """Digest and milliseconds of the winner if it is not a fallback, else of the fastest config
    that is not a fallback."""
    curves: tuple[LatencyCurve, ...]
    """Latency curves of the fallback configs."""


@dataclass(frozen=True)
class SizeTable:
    """Config for each size of a range; equal on all ranks."""

    times: SizeTimes
    configs: dict[str, Config]

    @classmethod
    def of(cls, times: SizeTimes, space: ConfigSpace) -> SizeTable:
        digests = [times.winner, *(curve.digest for curve in times.curves)]
        if times.fixed is not None:
            digests.append(times.fixed[0])
        found = {digest: space.find(digest) for digest in digests}
        return cls(times, {name: config for name, config in found.items() if config is not None})

    def at(self, size: int) -> Config:
        """Return the config that is expected to be the fastest; in doubt, a fallback config."""
        curves, fixed = self.times.curves, self.times.fixed
        estimates = {curve.digest: curve.at(size) for curve in curves}
        known = not curves or abs(size - curves[0].size) <= _MAX_DISTANCE_OF_MEASURED * size
        if fixed is not None and (
            known or fixed[1] < _MAX_SHARE_OF_FIXED_TILES * min(estimates.values())
        ):
            estimates[fixed[0]] = fixed[1]
        winner = self.times.winner
        chosen = min(estimates, key=estimates.__getitem__, default=winner)
        if (
            known
            and winner in estimates
            and estimates[chosen] > _MAX_SHARE_TO_REPLACE_WINNER * estimates[winner]
        ):
            chosen = winner
        return self.configs[chosen if chosen in self.configs else winner]


def size_times(
    record: TuningRecord,
    at: int,
    others: Sequence[tuple[int, TuningRecord]],
    is_fallback: Mapping[str, bool],
) -> SizeTimes:
    """Return the latency curves of ``record``, which was measured at size ``at``.

    Args:
        others: measured sizes and records of other ranges.
        is_fallback: by digest of the usable configs (including the winner).
    """
    medians = {digest: ms for digest, ms in _medians(record).items() if digest in is_fallback}
    nearest = sorted(others, key=lambda each: abs(each[0] - at))
    elsewhere = [(size, _medians(each)) for size, each in nearest if size != at]
    slopes = {}
    for digest in filter(is_fallback.__getitem__, medians):
        there = [(size, known[digest]) for size, known in elsewhere if digest in known]
        slopes[digest] = _slopes(at, medians[digest], there)
    # For configs measured at only one size, use the median growth of the others.
    median_slopes = [
        statistics.median([each for each in side if each is not None] or [0.0])
        for side in zip(*slopes.values(), strict=True)
    ]
    curves = []
    for digest, sides in slopes.items():
        down, up = (
            u if each is None else each for each, u in zip(sides, median_slopes, strict=True)
        )
        curves.append(LatencyCurve(digest, at, medians[digest], down, up))
    winner = record.best.digest
    tiled = {digest: ms for digest, ms in medians.items() if not is_fallback[digest]}
    first = winner if winner in tiled else min(tiled, key=tiled.__getitem__, default="")
    fixed = (first, tiled[first]) if first else None
    return SizeTimes(winner, fixed, tuple(curves))


def _slopes(
    at: int, ms: float, there: Sequence[tuple[int, float]]
) -> tuple[float | None, float | None]:
    """Return the slopes of a ``LatencyCurve`` from the times at other sizes (nearest first)."""

    def slope(size: int, other: float) -> float:
        share = (ms - other) / ms * at / (at - size) if ms > 0 else 0.0
        return min(1.0, max(0.0, share))

    below = [each for each in there if each[0] < at]
    above = [each for each in there if each[0] > at]
    apart_below = [each for each in below if each[0] <= _MAX_SLOPE_RATIO * at]
    apart_above = [each for each in above if at <= _MAX_SLOPE_RATIO * each[0]]
    down, up = below or apart_above, above or apart_below
    return slope(*down[0]) if down else None, slope(*up[0]) if up else None


def _medians(record: TuningRecord) -> dict[str, float]:
    """Return medians, without configs that were dropped early after few samples."""
    measured = [trial for trial in record.trials if isinstance(trial.outcome, Measurement)]
    most = max(len(trial.outcome.samples) for trial in measured)  # type: ignore[union-attr]
    return {
        trial.digest: trial.outcome.median  # type: ignore[union-attr]
        for trial in measured
        if 3 * len(trial.outcome.samples) >= min(most, 6)  # type: ignore[union-attr]
    }
