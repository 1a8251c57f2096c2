"""The next launch of a kernel inside a function, one at a time.

A search over a whole function asks for many samples of a config at once; here a call of the
function is one launch of each kernel, so a plan goes launch by launch. Plans use no clock and no
randomness: told the same on all ranks, they go on alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from triton_dist._tuning.values import Config


@dataclass(frozen=True)
class LaunchStep:
    """One launch."""

    config: Config
    timed: bool


class InOrder:
    """Every config ``warmup`` times untimed, then ``repeat`` times timed, one config after another.

    What failed is left out from then on. ``current`` is the step to take; ``None``: all is known.
    """

    def __init__(self, candidates: Sequence[Config], warmup: int, repeat: int) -> None:
        self._candidates, self._warmup, self._repeat = candidates, warmup, repeat
        self.samples: dict[str, list[float]] = {config.digest: [] for config in candidates}
        self._steps = self._plan()
        self.current: LaunchStep | None = None
        self._advance()

    def tell(self, milliseconds: float) -> None:
        """The current step was taken. An untimed one's time does not count."""
        if self.current is not None and self.current.timed:
            self.samples[self.current.config.digest].append(milliseconds)
        self._advance()

    def fail(self, digest: str) -> None:
        """A config, not always the current one, cannot be used."""
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


class Race(InOrder):
    """Clear losers leave early.

    =====  ==================================================  ================================
    round  launches of each config that is left                leaves
    =====  ==================================================  ================================
    1      one untimed (if ``warmup`` is not 0), one timed     who took more than twice as long
                                                               as the fastest, and the last third
    2      one timed                                           who is behind by half, and all but
                                                               a third of the first field
    final  up to ``repeat`` in all, in turn, forward and       nobody
           backward, so that a drifting clock hits all alike
    =====  ==================================================  ================================

    So with the default 3 + 5 launches a race takes less than half of what :class:`InOrder` takes,
    whatever the times are. A config stands where the lower median of its samples stands: noise is
    mostly delay, and one hiccup must not end a race.
    """

    _CLEARLY_SLOWER = (2.0, 1.5)

    def _plan(self) -> Iterator[LaunchStep]:
        field = list(self._candidates)
        two_thirds, third = math.ceil(2 * len(field) / 3), math.ceil(len(field) / 3)
        for config in field:
            yield from self._launches(config, min(self._warmup, 1), 1)
        if self._repeat > 1:
            field = self._fastest(field, self._CLEARLY_SLOWER[0], two_thirds)
            for config in field:
                yield LaunchStep(config, timed=True)
            field = self._fastest(field, self._CLEARLY_SLOWER[1], third)
        for _ in range(self._repeat - 2 if len(field) > 1 else 0):
            for config in field:
                yield LaunchStep(config, timed=True)
            field.reverse()

    def _fastest(self, field: Sequence[Config], slower: float, most: int) -> list[Config]:
        ranked = sorted(
            (config for config in field if config.digest in self.samples), key=self._status
        )
        return [
            config
            for config in ranked[:most]
            if self._status(config) <= slower * self._status(ranked[0])
        ]

    def _status(self, config: Config) -> float:
        return statistics.median_low(self.samples[config.digest])
