"""Plan the next launch of a kernel inside a function, one launch at a time.

A search over a whole function requests several samples of a config at a time. In contextual
tuning, one call of the function launches each kernel once, so a plan advances by one launch. Plans
are deterministic: equal times on all ranks lead to equal launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from triton_dist._tuning.values import Config, LaunchStep


class OrderedPlan:
    """Plan that launches each config ``warmup`` times untimed, then ``repeat`` times timed.

    Failed configs are left out. ``current`` is the next step, or ``None`` at the end.
    """

    def __init__(self, candidates: Sequence[Config], warmup: int, repeat: int) -> None:
        self._candidates, self._warmup, self._repeat = candidates, warmup, repeat
        self.samples: dict[str, list[float]] = {config.digest: [] for config in candidates}
        self._steps = self._plan()
        self.current: LaunchStep | None = None
        self._advance()

    def tell(self, milliseconds: float) -> None:
        """Record the time of the current step, if it is timed, and advance."""
        if self.current is not None and self.current.timed:
            self.samples[self.current.config.digest].append(milliseconds)
        self._advance()

    def fail(self, digest: str) -> None:
        """Leave out a config, which need not be the current one."""
        self.samples.pop(digest, None)
        if self.current is not None and self.current.config.digest == digest:
            self._advance()

    def _advance(self) -> None:
        remaining = (step for step in self._steps if step.config.digest in self.samples)
        self.current = next(remaining, None)

    def _plan(self) -> Iterator[LaunchStep]:
        for config in self._candidates:
            yield from self._launches(config, self._warmup, self._repeat)

    def _launches(self, config: Config, warmup: int, repeat: int) -> Iterator[LaunchStep]:
        for launch in range(warmup + repeat):
            yield LaunchStep(config, timed=launch >= warmup)


class RacingPlan(OrderedPlan):
    """Plan that drops clear losers early.

    =====  ==================================================  ================================
    stage  launches of each remaining config                   configs dropped
    =====  ==================================================  ================================
    1      one untimed (if ``warmup`` is not 0), one timed     slower than 2x the fastest, and
                                                               the slowest third
    2      one timed                                           slower than 1.5x the fastest, and
                                                               all but a third of the configs
    final  up to ``repeat`` in total, alternating forward and  none
           backward, so clock drift affects all alike
    =====  ==================================================  ================================

    With the default 3 + 5 launches a race takes less than half of :class:`OrderedPlan`'s launches.
    Configs are ranked by the lower median of their samples, because noise is mostly delay: one
    delayed launch must not drop a config.
    """

    _CLEARLY_SLOWER = (2.0, 1.5)

    def _plan(self) -> Iterator[LaunchStep]:
        candidates = list(self._candidates)
        two_thirds, third = math.ceil(2 * len(candidates) / 3), math.ceil(len(candidates) / 3)
        for config in candidates:
            yield from self._launches(config, min(self._warmup, 1), 1)
        if self._repeat > 1:
            candidates = self._fastest(candidates, self._CLEARLY_SLOWER[0], two_thirds)
            for config in candidates:
                yield LaunchStep(config, timed=True)
            candidates = self._fastest(candidates, self._CLEARLY_SLOWER[1], third)
        for _ in range(self._repeat - 2 if len(candidates) > 1 else 0):
            for config in candidates:
                yield LaunchStep(config, timed=True)
            candidates.reverse()

    def _fastest(self, candidates: Sequence[Config], slower: float, most: int) -> list[Config]:
        ranked = sorted(
            (config for config in candidates if config.digest in self.samples), key=self._level
        )
        return [
            config
            for config in ranked[:most]
            if self._level(config) <= slower * self._level(ranked[0])
        ]

    def _level(self, config: Config) -> float:
        return statistics.median_low(self.samples[config.digest])
