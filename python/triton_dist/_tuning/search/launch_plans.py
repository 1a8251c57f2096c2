"""Plan the launches of one kernel for ``contextual_autotune``, one launch at a time.

``contextual_autotune`` tunes the kernels that a function launches by calling the function again
and again. Each call launches each kernel with one config, so a plan advances by one launch per
call. Plans are deterministic: equal times on all ranks lead to equal launches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from triton_dist._tuning.values import Config, LaunchStep


class OrderedPlan:
    """Plan that launches each config ``warmup`` times untimed, then ``repeat`` times timed.

    Configs that failed are not launched again.

    Attributes:
        samples: milliseconds of the timed launches, by the digest of the config. Configs that
            failed are missing.
        current: the next launch, or ``None`` at the end.
    """

    def __init__(self, candidates: Sequence[Config], warmup: int, repeat: int) -> None:
        self._candidates, self._warmup, self._repeat = candidates, warmup, repeat
        self.samples: dict[str, list[float]] = {config.digest: [] for config in candidates}
        self._steps = self._plan()
        self.current: LaunchStep | None = None
        self._advance()

    def tell(self, milliseconds: float) -> None:
        """Record the time of the current launch, if it is timed, and advance."""
        if self.current is not None and self.current.is_timed:
            self.samples[self.current.config.digest].append(milliseconds)
        self._advance()

    def fail(self, digest: str) -> None:
        """Drop the config with this digest. It need not be the config of ``current``."""
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
            yield LaunchStep(config, is_timed=launch >= warmup)


class RacingPlan(OrderedPlan):
    """Plan that drops clear losers early.

    =====  ===============================================  ======================================
    stage  launches of each remaining config                configs dropped after the stage
    =====  ===============================================  ======================================
    1      one untimed (if ``warmup`` is not 0), one timed  slower than 2x the fastest, and the
                                                            slowest third of all configs
    2      one timed                                        slower than 1.5x the fastest; at most
                                                            a third of all configs remains
    final  timed, until each has ``repeat`` timed launches  none
    =====  ===============================================  ======================================

    Rounds of the final alternate between forward and backward order, so clock drift affects all
    configs alike. With the default ``warmup`` 3 and ``repeat`` 5, a race takes less than half as
    many launches as :class:`OrderedPlan`. Configs are ranked by the lower median of their samples,
    because noise mostly adds time. From two samples on, one delayed launch drops no config.
    """

    _MAX_SLOWDOWNS = (2.0, 1.5)

    def _plan(self) -> Iterator[LaunchStep]:
        candidates = list(self._candidates)
        two_thirds, third = math.ceil(2 * len(candidates) / 3), math.ceil(len(candidates) / 3)
        for config in candidates:
            yield from self._launches(config, min(self._warmup, 1), 1)
        if self._repeat > 1:
            candidates = self._fastest(candidates, self._MAX_SLOWDOWNS[0], two_thirds)
            for config in candidates:
                yield LaunchStep(config, is_timed=True)
            candidates = self._fastest(candidates, self._MAX_SLOWDOWNS[1], third)
        for _ in range(self._repeat - 2 if len(candidates) > 1 else 0):
            for config in candidates:
                yield LaunchStep(config, is_timed=True)
            candidates.reverse()

    def _fastest(
        self, candidates: Sequence[Config], max_slowdown: float, max_number: int
    ) -> list[Config]:
        valid = (config for config in candidates if config.digest in self.samples)
        ranked = sorted(valid, key=self._median)
        return [
            config
            for config in ranked[:max_number]
            if self._median(config) <= max_slowdown * self._median(ranked[0])
        ]

    def _median(self, config: Config) -> float:
        return statistics.median_low(self.samples[config.digest])
