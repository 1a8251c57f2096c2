"""Clocks that drift while candidates are measured once or twice each.

In the early rounds of a race, a lap over hundreds of candidates takes long, and a candidate's
first sample shares its clocks with the few that were measured beside it, not with all. So time is
cut into *blocks* of consecutive samples. Those that were measured in two blocks and more tell how
these differ; that is fitted, and taken out of everybody's samples.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable

_BLOCK = 16
_PASSES = 10
_HICCUP = 0.1
"""A sample that is further from its candidate's level, relatively, is no matter of clocks."""


class Drift:
    """Samples of the candidates of one race, in milliseconds, with the order in which they came."""

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._blocks: defaultdict[str, list[int]] = defaultdict(list)
        self._taken = 0
        self._speed: dict[int, float] = {}
        """By block, the factor by which runs took longer in it, about 1."""

    def add(self, digest: str, samples: Iterable[float]) -> None:
        """``samples`` were taken now, one after another."""
        for time in samples:
            self._times[digest].append(time)
            self._blocks[digest].append(self._taken // _BLOCK)
            self._taken += 1

    def first_block(self, digest: str) -> int:
        """Block of the first sample."""
        return self._blocks[digest][0]

    def fit(self, digests: Iterable[str]) -> None:
        """Estimate each block's speed from the samples of these: alternately the candidates' levels
        and the blocks' speeds, from where the last fit ended."""
        several = [digest for digest in digests if len(self._times[digest]) > 1]
        for _ in range(_PASSES):
            ratios: defaultdict[int, list[float]] = defaultdict(list)
            for digest in several:
                steady = self.steadied(digest)
                level = statistics.median(steady) or 1.0
                for time, block in zip(steady, self._blocks[digest], strict=True):
                    if abs(time / level - 1) < _HICCUP:
                        ratios[block].append(time / level)
            # Means: a block is half before a step of the clocks and half after it, and medians that
            # take sides come to rest far from what fits.
            for block, each in ratios.items():
                self._speed[block] = self._speed.get(block, 1.0) * statistics.fmean(each)
            # Only how they differ is known; what is not known is in the middle.
            mean = statistics.fmean(self._speed.values()) if self._speed else 1.0
            self._speed = {block: speed / mean for block, speed in self._speed.items()}

    def steadied(self, digest: str) -> list[float]:
        """Its samples without the drift, as far as it is known."""
        times, blocks = self._times[digest], self._blocks[digest]
        return [
            time / self._speed.get(block, 1.0) for time, block in zip(times, blocks, strict=True)
        ]
