"""The config for an exact size within a range that shares a tuning.

A library picks its tiles by the exact size, so its time grows with the size. A kernel of fixed
tiles takes as long for the first rows of a tile as for all of them. So what wins at the end of a
range may lose at its beginning; the wider the range, the more. Nothing is measured to know where:
the times of configs that are safe are those at the ends of this range and the one before, and what
lies between them; the time of the others, and of those that the range before did not measure, is
that at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.values import Config, ConfigSpace, Measurement, TuningRecord

_WORTH = 0.99
"""Share of the winner's time below which another config replaces it."""


class Line(NamedTuple):
    """Milliseconds of a config by size, a straight line through two measurements."""

    digest: str
    low: int
    ms_low: float
    high: int
    ms_high: float

    def at(self, size: int) -> float:
        slope = (self.ms_high - self.ms_low) / (self.high - self.low)
        return self.ms_high + slope * (size - self.high)


class Times(NamedTuple):
    """Words of the leader to all ranks: plain values."""

    winner: str
    """Digest of the record's winner."""
    fixed: tuple[str, float] | None
    """Digest and milliseconds of the fastest config that has no line."""
    lines: tuple[Line, ...]
    """Those that are safe, and were measured at a smaller size too."""


@dataclass(frozen=True)
class Span:
    """The configs of a range by size; the same on all ranks."""

    times: Times
    configs: dict[str, Config]

    @classmethod
    def of(cls, times: Times, space: ConfigSpace) -> Span:
        digests = [times.winner, *(line.digest for line in times.lines)]
        if times.fixed is not None:
            digests.append(times.fixed[0])
        found = {digest: space.find(digest) for digest in digests}
        return cls(times, {name: config for name, config in found.items() if config is not None})

    def at(self, size: int) -> Config:
        """The config that should be the fastest."""
        estimates = {line.digest: line.at(size) for line in self.times.lines}
        if self.times.fixed is not None:
            estimates.setdefault(*self.times.fixed)
        winner = self.times.winner
        chosen = min(estimates, key=estimates.__getitem__, default=winner)
        if winner in estimates and estimates[chosen] > _WORTH * estimates[winner]:
            chosen = winner
        return self.configs.get(chosen, self.configs[winner])


def times_of(
    record: TuningRecord,
    at: int,
    below: Sequence[tuple[int, TuningRecord]],
    is_safe: Mapping[str, bool],
) -> Times:
    """The times of ``record``, which was measured at size ``at``.

    Args:
        below: records of smaller sizes with these, the nearest first.
        is_safe: by digest of the configs that may be used, the winner among them.
    """
    medians = {digest: ms for digest, ms in _medians(record).items() if digest in is_safe}
    lines = []
    for digest in medians:
        if not is_safe[digest]:
            continue
        there = ((size, _medians(each).get(digest)) for size, each in below if size < at)
        size, ms = next(((size, ms) for size, ms in there if ms is not None), (0, None))
        if ms is not None:
            lines.append(Line(digest, size, ms, at, medians[digest]))
    with_line = {line.digest for line in lines}
    fixed = min(
        ((digest, ms) for digest, ms in medians.items() if digest not in with_line),
        key=lambda pair: pair[1],
        default=None,
    )
    return Times(record.best.digest, fixed, tuple(lines))


def _medians(record: TuningRecord) -> dict[str, float]:
    """Medians, but for configs that were dropped early, whose few samples say little."""
    measured = [trial for trial in record.trials if isinstance(trial.outcome, Measurement)]
    most = max(len(trial.outcome.samples) for trial in measured)  # type: ignore[union-attr]
    return {
        trial.digest: trial.outcome.median  # type: ignore[union-attr]
        for trial in measured
        if 3 * len(trial.outcome.samples) >= min(most, 6)  # type: ignore[union-attr]
    }
