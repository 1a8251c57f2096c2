"""Choose the config for an exact size, such as a number of rows, within a range of sizes.

All sizes of a range share one tuning, which measures one size. The time of a library grows with the
size, because a library selects its tiles by the exact size. A kernel with fixed tiles takes the
same time for one row of a tile as for all. Hence the winner at the end of a wide range may lose at
the beginning of the range.

The size table predicts the winner of each size without measurements. The time of a library config
(a config for which ``fallback_fn`` is true) is interpolated between the nearest measured sizes, and
grows at most in proportion to the size. The time of any other config is taken as constant within
the range.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.values import Config, ConfigSpace, Measurement, TuningRecord

_MAX_SHARE_TO_REPLACE_WINNER = 0.99
"""Near the measured size, another config replaces the winner only if its time is at most this
fraction of the winner's time. At other sizes, both times are predictions, and the faster config is
chosen."""
_MAX_SHARE_OF_FIXED_TILES = 0.98
"""At other sizes, a config with fixed tiles is used only if its time is below this fraction of the
fastest fallback's time. Some configs take longer for fewer rows of a tile (99 us for 33 rows, 92 us
for 48 rows)."""
_MAX_RELATIVE_DISTANCE = 1 / 64
"""A size is near the measured size if their relative difference is at most this number."""
_MAX_SLOPE_RATIO = 15 / 16
"""Two sizes are used to extrapolate a slope if their ratio is at most this number. Between closer
sizes, a change of the library's tiles distorts the slope (44 us per row instead of 0.4)."""


class LatencyCurve(NamedTuple):
    """Predicted time of one config as a function of the size."""

    digest: str
    size: int
    ms: float
    slope_down: float
    """At smaller sizes: fraction of ``ms`` that is proportional to the size."""
    slope_up: float
    """At larger sizes: fraction of ``ms`` that is proportional to the size."""

    def ms_at(self, size: int) -> float:
        slope = self.slope_up if size > self.size else self.slope_down
        return self.ms * (1 + slope * (size / max(1, self.size) - 1))


class LatencyCurves(NamedTuple):
    """Times from which rank 0 builds a size table. They are broadcast to all ranks."""

    winner: str
    best_non_fallback: tuple[str, float] | None
    """Digest and milliseconds of one config that is not a fallback: of the winner or, if the winner
    is a fallback, of the fastest. ``None`` if all configs are fallbacks."""
    curves: tuple[LatencyCurve, ...]


@dataclass(frozen=True)
class SizeTable:
    """The config to use for each size of a range. Equal on all ranks."""

    times: LatencyCurves
    configs: dict[str, Config]

    @classmethod
    def of(cls, times: LatencyCurves, space: ConfigSpace) -> SizeTable:
        digests = [times.winner, *(curve.digest for curve in times.curves)]
        if times.best_non_fallback is not None:
            digests.append(times.best_non_fallback[0])
        configs = {digest: space.find(digest) for digest in digests}
        return cls(times, {name: config for name, config in configs.items() if config is not None})

    def config_for(self, size: int) -> Config:
        """Return the config that is expected to be the fastest; in doubt, a fallback config."""
        curves, best_non_fallback = self.times.curves, self.times.best_non_fallback
        estimates = {curve.digest: curve.ms_at(size) for curve in curves}
        is_near = not curves or abs(size - curves[0].size) <= _MAX_RELATIVE_DISTANCE * size
        if best_non_fallback is not None and (
            is_near or best_non_fallback[1] < _MAX_SHARE_OF_FIXED_TILES * min(estimates.values())
        ):
            estimates[best_non_fallback[0]] = best_non_fallback[1]
        winner = self.times.winner
        chosen = min(estimates, key=estimates.__getitem__, default=winner)
        if (
            is_near
            and winner in estimates
            and estimates[chosen] > _MAX_SHARE_TO_REPLACE_WINNER * estimates[winner]
        ):
            chosen = winner
        return self.configs[chosen if chosen in self.configs else winner]


def build_latency_curves(
    record: TuningRecord,
    measured_size: int,
    others: Sequence[tuple[int, TuningRecord]],
    is_fallback: Mapping[str, bool],
) -> LatencyCurves:
    """Return the latency curves of the configs in ``record``, measured at ``measured_size``.

    Args:
        others: measured sizes and records of other ranges.
        is_fallback: by digest of the usable configs, which include the winner.
    """
    medians = {digest: ms for digest, ms in _medians(record).items() if digest in is_fallback}
    nearest = sorted(others, key=lambda each: abs(each[0] - measured_size))
    other_medians = [(size, _medians(each)) for size, each in nearest if size != measured_size]
    slopes = {}
    for digest in filter(is_fallback.__getitem__, medians):
        other_times = [(size, ms[digest]) for size, ms in other_medians if digest in ms]
        slopes[digest] = _slopes(measured_size, medians[digest], other_times)
    # For a config that was measured at one size only, use the median slope of the other configs.
    median_slopes = [
        statistics.median([each for each in side if each is not None] or [0.0])
        for side in zip(*slopes.values(), strict=True)
    ]
    curves = []
    for digest, sides in slopes.items():
        pairs = zip(sides, median_slopes, strict=True)
        down, up = (median if each is None else each for each, median in pairs)
        curves.append(LatencyCurve(digest, measured_size, medians[digest], down, up))
    winner = record.best.digest
    tiled = {digest: ms for digest, ms in medians.items() if not is_fallback[digest]}
    chosen = winner if winner in tiled else min(tiled, key=tiled.__getitem__, default="")
    return LatencyCurves(winner, (chosen, tiled[chosen]) if chosen else None, tuple(curves))


def _slopes(
    measured_size: int, ms: float, other_times: Sequence[tuple[int, float]]
) -> tuple[float | None, float | None]:
    """Return ``slope_down`` and ``slope_up`` of a :class:`LatencyCurve`; ``None`` if not known.

    ``other_times`` has other sizes and the milliseconds there, nearest size first.
    """

    def slope(size: int, other_ms: float) -> float:
        share = (ms - other_ms) / ms * measured_size / (measured_size - size) if ms > 0 else 0.0
        return min(1.0, max(0.0, share))

    below = [each for each in other_times if each[0] < measured_size]
    above = [each for each in other_times if each[0] > measured_size]
    apart_below = [each for each in below if each[0] <= _MAX_SLOPE_RATIO * measured_size]
    apart_above = [each for each in above if measured_size <= _MAX_SLOPE_RATIO * each[0]]
    down, up = below or apart_above, above or apart_below
    return slope(*down[0]) if down else None, slope(*up[0]) if up else None


def _medians(record: TuningRecord) -> dict[str, float]:
    """Return the median of each config, by digest, without configs that have few samples."""
    measured = [trial for trial in record.trials if isinstance(trial.outcome, Measurement)]
    max_samples = max(len(trial.outcome.samples) for trial in measured)  # type: ignore[union-attr]
    return {
        trial.digest: trial.outcome.median  # type: ignore[union-attr]
        for trial in measured
        if 3 * len(trial.outcome.samples) >= min(max_samples, 6)  # type: ignore[union-attr]
    }
