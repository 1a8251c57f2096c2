"""A brief race of few candidates whose order is nearly known: they won at sizes beside this one.

Laps over those that are left, forward and backward, until one is left, noise is below the
indifference zone, or laps or device time run out. No lap but the first is left half done: more
samples alone would let a config win. So a first call at a new size costs milliseconds, no tuning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from triton_dist._tuning.search.racing import Requesting
from triton_dist._tuning.values import Config, Failure, Outcome, Policy, Request

ROUNDS = (1, 1, 1, 2)
"""Samples of each candidate in each lap."""
_FIRST_MARGIN = 0.2
"""A candidate so far behind after one sample leaves; the noise is not known then. (Of a library's
way that takes 756 us, one sample was 909; its rival takes 775.)"""
_SEVERAL, _FEW_MARGIN = 3, 0.04
"""With fewer degrees of freedom, those of all candidates together, the spread of samples is no
measure of the noise, and nobody leaves who is less behind."""
_STANDARD_ERRORS = 2.0


class Brief(Requesting):
    """A race of ``candidates``, the most promising first.

    No clock and no randomness, as of any search.

    Args:
        policy: its ``indifference``, and its ``untimed`` to count what a request takes.
        milliseconds: device time that may be spent. The first two have a sample whatever it takes,
            and whom it ends before is not tried.
    """

    def __init__(self, candidates: Sequence[Config], policy: Policy, milliseconds: float) -> None:
        self._candidate_set, self._policy, self._milliseconds = (
            list(candidates),
            policy,
            milliseconds,
        )
        self._samples: dict[str, list[float]] = {}
        self._spent = 0.0
        self._requests = self._race()
        self._ahead = self._candidate_set

    def tell(self, request: Request, outcome: Outcome) -> None:
        digest = request.config.digest
        if isinstance(outcome, Failure):
            self._samples.pop(digest, None)
            return
        untimed = self._policy.untimed + (digest not in self._samples)  # the run to the end
        self._spent += sum(outcome.samples) + untimed * outcome.median
        self._samples.setdefault(digest, []).extend(outcome.samples)

    def _race(self) -> Iterator[Request]:
        for place, config in enumerate(self._candidate_set):
            # What one more takes is known from those before it.
            if place >= 2 and self._spent * (place + 1) / place > self._milliseconds:
                break
            yield Request(config, ROUNDS[0])
        left = self._close(self._candidate_set)
        for round_ in ROUNDS[1:]:
            left = self._affordable(left, round_)[::-1]
            if len(left) < 2:
                return
            for config in left:
                yield Request(config, round_)
            left = self._close(left)

    def _close(self, candidates: Sequence[Config]) -> list[Config]:
        """Candidates that may be the fastest by more than nobody minds, in their order."""
        medians = {
            config: self._median(config) for config in candidates if config.digest in self._samples
        }
        margin = self._margin([self._samples[config.digest] for config in medians])
        limit = min(medians.values(), default=0.0) * (1 + margin)
        return [config for config, median in medians.items() if median <= limit]

    def _affordable(self, candidates: Sequence[Config], round_: int) -> list[Config]:
        """As many, the fastest, as a lap of so many samples has time for; in their order."""
        runs = round_ + self._policy.untimed
        time = self._milliseconds - self._spent
        chosen = set()
        for config in sorted(candidates, key=self._median):
            time -= runs * self._median(config)
            if time < 0:
                break
            chosen.add(config)
        return [config for config in candidates if config in chosen]

    def _median(self, config: Config) -> float:
        return statistics.median(self._samples[config.digest])

    def _margin(self, round_: Sequence[Sequence[float]]) -> float:
        """Relative delay that noise may add to an equal of the fastest; 0 if that is no more than
        nobody minds. ``round_``: samples of those that were in the last lap, as many of each."""
        several = [own for own in self._samples.values() if len(own) > 1]
        if not several:
            return _FIRST_MARGIN
        freedom = sum(len(own) - 1 for own in several)
        squares = sum(
            (statistics.stdev(o) / (statistics.fmean(o) or 1)) ** 2 * (len(o) - 1) for o in several
        )
        error = _STANDARD_ERRORS * math.sqrt(
            squares / freedom * 2 / min(map(len, round_), default=1)
        )
        if freedom < _SEVERAL:
            return max(error, _FEW_MARGIN)
        return error if error > self._policy.indifference else 0.0
