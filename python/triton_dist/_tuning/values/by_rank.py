"""Differences between ranks in a config, of which otherwise the slowest alone counts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class ByRank(NamedTuple):
    """Times of one config; a number for each rank, in the order of ranks."""

    ms: tuple[float, ...]
    """Median of the rank's own samples."""
    slowest: tuple[int, ...]
    """Number of samples in which the rank was the slowest; of equals the lowest rank."""

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> ByRank:
        """``samples`` in the order in which they were taken, by rank."""
        laps = list(zip(*samples, strict=True))
        slowest = [lap.index(max(lap)) for lap in laps]
        medians = (round(statistics.median(own), 6) for own in samples)
        return cls(tuple(medians), tuple(map(slowest.count, range(len(samples)))))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ByRank:
        return cls(tuple(map(float, tree["ms"])), tuple(map(int, tree["slowest"])))

    def to_tree(self) -> dict[str, Any]:
        return {"ms": list(self.ms), "slowest": list(self.slowest)}

    def __str__(self) -> str:
        """The slowest rank and the span of the medians, in words."""
        worst = max(range(len(self.slowest)), key=self.slowest.__getitem__)
        low, high = (pick(range(len(self.ms)), key=self.ms.__getitem__) for pick in (min, max))
        return (
            f"rank {worst} was the slowest in {self.slowest[worst]} of {sum(self.slowest)} "
            f"samples; medians from {self.ms[low]:.4f} ms (rank {low}) to {self.ms[high]:.4f} ms "
            f"(rank {high})"
        )
