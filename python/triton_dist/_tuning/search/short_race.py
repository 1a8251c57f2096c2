"""Race a few candidates for some milliseconds, at the first call of a function at a new size.

The candidates are the configs that are near the best at neighbouring sizes. A *sample* is the time
of one run. Each round samples the remaining candidates, in the reverse order of the round before.
The race ends when one candidate is left, after the last round, or when the device time is spent.
Only the first round may end early, because a config with more samples would have an advantage.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from triton_dist._tuning.search.racing import IteratorSearch
from triton_dist._tuning.values import Config, Failure, Outcome, Policy, Request

ROUNDS = (1, 1, 1, 2)
"""Samples of each candidate in each round."""
_FIRST_MARGIN = 0.2
"""While every candidate has one sample, the noise is unknown: drop candidates that are slower than
the fastest by more than 20 %. (One sample of the best algorithm took 909 us instead of 756 us, and
the second-best took 775 us.)"""
_MIN_DEGREES_OF_FREEDOM, _MARGIN_FEW_DEGREES = 3, 0.04
"""With fewer degrees of freedom, summed over the candidates, the standard deviation of the samples
is unreliable. A candidate then stays if it is slower than the fastest by at most 4 %."""
_NUM_STANDARD_ERRORS = 2.0


class ShortRace(IteratorSearch):
    """Deterministic search that races ``candidates`` in their order.

    Args:
        candidates: the most promising first.
        policy: its ``indifference`` and ``untimed_runs`` are used.
        milliseconds: device time to spend. The first two candidates are sampled in any case, and
            the rest only while time is left.
    """

    def __init__(self, candidates: Sequence[Config], policy: Policy, milliseconds: float) -> None:
        self._candidates, self._policy, self._milliseconds = (
            list(candidates),
            policy,
            milliseconds,
        )
        self._samples: dict[str, list[float]] = {}
        self._spent = 0.0
        self._requests = self._race()
        self._upcoming = self._candidates

    def tell(self, request: Request, outcome: Outcome) -> None:
        digest = request.config.digest
        if isinstance(outcome, Failure):
            self._samples.pop(digest, None)
            return
        # The first request of a config includes one more untimed run.
        num_untimed = self._policy.untimed_runs + (digest not in self._samples)
        self._spent += sum(outcome.samples) + num_untimed * outcome.median
        self._samples.setdefault(digest, []).extend(outcome.samples)

    def _race(self) -> Iterator[Request]:
        for index, config in enumerate(self._candidates):
            # Estimate the time of the next candidate by the mean of the earlier candidates.
            if index >= 2 and self._spent * (index + 1) / index > self._milliseconds:
                break
            yield Request(config, ROUNDS[0])
        remaining = self._possible_winners(self._candidates)
        for samples in ROUNDS[1:]:
            remaining = self._affordable(remaining, samples)[::-1]
            if len(remaining) < 2:
                return
            for config in remaining:
                yield Request(config, samples)
            remaining = self._possible_winners(remaining)

    def _possible_winners(self, candidates: Sequence[Config]) -> list[Config]:
        """Return the candidates that may be the fastest, considering noise, in their order."""
        medians = {
            config: self._median(config) for config in candidates if config.digest in self._samples
        }
        margin = self._margin([self._samples[config.digest] for config in medians])
        limit = min(medians.values(), default=0.0) * (1 + margin)
        return [config for config, median in medians.items() if median <= limit]

    def _affordable(self, candidates: Sequence[Config], samples: int) -> list[Config]:
        """Return the fastest candidates with time left for ``samples`` more samples."""
        runs = samples + self._policy.untimed_runs
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

    def _margin(self, remaining: Sequence[Sequence[float]]) -> float:
        """Return the relative difference of two candidates that noise may cause; 0 if it is at most
        ``Policy.indifference``. ``remaining`` has the samples of each candidate of the last round.
        """
        repeated = [each for each in self._samples.values() if len(each) > 1]
        if not repeated:
            return _FIRST_MARGIN
        degrees_of_freedom = sum(len(each) - 1 for each in repeated)
        sum_of_squares = sum(
            (statistics.stdev(each) / (statistics.fmean(each) or 1)) ** 2 * (len(each) - 1)
            for each in repeated
        )
        num_samples = min(map(len, remaining), default=1)
        error = _NUM_STANDARD_ERRORS * math.sqrt(
            sum_of_squares / degrees_of_freedom * 2 / num_samples
        )
        if degrees_of_freedom < _MIN_DEGREES_OF_FREEDOM:
            return max(error, _MARGIN_FEW_DEGREES)
        return error if error > self._policy.indifference else 0.0
