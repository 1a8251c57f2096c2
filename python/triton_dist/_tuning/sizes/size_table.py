"""The config for an exact size within a range that shares a tuning.

A library picks its tiles by the exact size, so its time grows with the size. A kernel of fixed
tiles takes as long for the first rows of a tile as for all of them. So what wins at the end of a
range may lose at its beginning; the wider the range, the more. Nothing is measured to know where:
from the size that was measured, the time of configs that are safe goes towards what they took at
the next one on either side, but grows no faster than the size; the time of the others stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.values import Config, ConfigSpace, Measurement, TuningRecord

_WORTH = 0.99
"""Share of the winner's time below which another config replaces it near the size at which it won;
elsewhere its time is a guess, too, and the fastest is taken."""
_SURE = 0.98
"""Share of the fastest safe config's time below which one of fixed tiles is used at a size that was
not measured: some take longer for fewer rows of a tile (99 us for 33, 92 for 48)."""
_NEAR = 1 / 64
"""Part of a size within which another one tells of it as if it had been measured."""
_APART = 15 / 16
"""Ratio of two sizes from which on times there tell how a time goes on beyond both. Between
nearer ones a library may take other tiles, which would tell of 44 us a row for 0.4."""


class LatencyCurve(NamedTuple):
    """Milliseconds of a config by size."""

    digest: str
    size: int
    """The one at which it was measured."""
    ms: float
    down: float
    up: float
    """The part of its time that is proportional to the size, for smaller and for larger ones; the
    rest is constant."""

    def at(self, size: int) -> float:
        growth = self.up if size > self.size else self.down
        return self.ms * (1 + growth * (size / max(1, self.size) - 1))


class SizeTimes(NamedTuple):
    """Words of the leader to all ranks: plain values."""

    winner: str
    """Digest of the record's winner."""
    fixed: tuple[str, float] | None
    """Digest and milliseconds of the winner, if it is not safe; else of the fastest that is not."""
    lines: tuple[LatencyCurve, ...]
    """Those of configs that are safe."""


@dataclass(frozen=True)
class SizeTable:
    """The configs of a range by size; the same on all ranks."""

    times: SizeTimes
    configs: dict[str, Config]

    @classmethod
    def of(cls, times: SizeTimes, space: ConfigSpace) -> SizeTable:
        digests = [times.winner, *(line.digest for line in times.lines)]
        if times.fixed is not None:
            digests.append(times.fixed[0])
        found = {digest: space.find(digest) for digest in digests}
        return cls(times, {name: config for name, config in found.items() if config is not None})

    def at(self, size: int) -> Config:
        """The config that should be the fastest; in doubt a safe one."""
        lines, fixed = self.times.lines, self.times.fixed
        estimates = {line.digest: line.at(size) for line in lines}
        known = not lines or abs(size - lines[0].size) <= _NEAR * size
        if fixed is not None and (known or fixed[1] < _SURE * min(estimates.values())):
            estimates[fixed[0]] = fixed[1]
        winner = self.times.winner
        chosen = min(estimates, key=estimates.__getitem__, default=winner)
        if known and winner in estimates and estimates[chosen] > _WORTH * estimates[winner]:
            chosen = winner
        return self.configs[chosen if chosen in self.configs else winner]


def size_times(
    record: TuningRecord,
    at: int,
    others: Sequence[tuple[int, TuningRecord]],
    is_fallback: Mapping[str, bool],
) -> SizeTimes:
    """The times of ``record``, which was measured at size ``at``.

    Args:
        others: records of other ranges, with the sizes at which they were measured.
        is_fallback: by digest of the configs that may be used, the winner among them.
    """
    medians = {digest: ms for digest, ms in _medians(record).items() if digest in is_fallback}
    nearest = sorted(others, key=lambda each: abs(each[0] - at))
    elsewhere = [(size, _medians(each)) for size, each in nearest if size != at]
    growths = {}
    for digest in filter(is_fallback.__getitem__, medians):
        there = [(size, known[digest]) for size, known in elsewhere if digest in known]
        growths[digest] = _growths(at, medians[digest], there)
    # Of a config that was not measured elsewhere, that of its like.
    usual = [
        statistics.median([each for each in side if each is not None] or [0.0])
        for side in zip(*growths.values(), strict=True)
    ]
    lines = []
    for digest, sides in growths.items():
        down, up = (u if each is None else each for each, u in zip(sides, usual, strict=True))
        lines.append(LatencyCurve(digest, at, medians[digest], down, up))
    winner = record.best.digest
    tiled = {digest: ms for digest, ms in medians.items() if not is_fallback[digest]}
    first = winner if winner in tiled else min(tiled, key=tiled.__getitem__, default="")
    fixed = (first, tiled[first]) if first else None
    return SizeTimes(winner, fixed, tuple(lines))


def _growths(
    at: int, ms: float, there: Sequence[tuple[int, float]]
) -> tuple[float | None, float | None]:
    """``LatencyCurve.down`` and ``up``, as far as times at other sizes tell, of which the nearest
    is first."""

    def towards(size: int, other: float) -> float:
        share = (ms - other) / ms * at / (at - size) if ms > 0 else 0.0
        return min(1.0, max(0.0, share))

    below = [each for each in there if each[0] < at]
    above = [each for each in there if each[0] > at]
    beyond = [each for each in below if each[0] <= _APART * at]
    across = [each for each in above if at <= _APART * each[0]]
    down, up = below or across, above or beyond
    return towards(*down[0]) if down else None, towards(*up[0]) if up else None


def _medians(record: TuningRecord) -> dict[str, float]:
    """Medians, but for configs that were dropped early, whose few samples say little."""
    measured = [trial for trial in record.trials if isinstance(trial.outcome, Measurement)]
    most = max(len(trial.outcome.samples) for trial in measured)  # type: ignore[union-attr]
    return {
        trial.digest: trial.outcome.median  # type: ignore[union-attr]
        for trial in measured
        if 3 * len(trial.outcome.samples) >= min(most, 6)  # type: ignore[union-attr]
    }
