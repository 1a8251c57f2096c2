"""Race the few candidates of a warm start: configs that are near the best at neighbouring sizes.

The race takes rounds over the remaining candidates, forward and backward. It ends when one is left,
when noise is below the indifference zone, or after the last round or the device time. Only the
first round may be incomplete, because a config with more samples would have an advantage. A first
call at a new size costs milliseconds instead of seconds.
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
"""Relative delay that drops a candidate after one sample, while the noise is unknown. (A sample of
a library algorithm took 909 us instead of 756 us; the second-best algorithm takes 775 us.)"""
_MIN_DEGREES_OF_FREEDOM, _MARGIN_FEW_DEGREES = 3, 0.04
"""With fewer degrees of freedom (over all candidates), the spread of the samples does not measure
the noise. A candidate that is slower by less than the margin then stays."""
_STANDARD_ERRORS = 2.0


class ShortRace(IteratorSearch):
    """Deterministic search that races ``candidates`` in their order.

    Args:
        candidates: the most promising first.
        policy: ``indifference`` is used, and ``untimed`` to count the runs of a request.
        milliseconds: device time to spend. The first two candidates are always sampled; later
            ones only while time is left.
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
        # The first request of a config includes one more untimed run.
        untimed = self._policy.untimed_runs + (digest not in self._samples)
        self._spent += sum(outcome.samples) + untimed * outcome.median
        self._samples.setdefault(digest, []).extend(outcome.samples)

    def _race(self) -> Iterator[Request]:
        for place, config in enumerate(self._candidate_set):
            # Estimate the time of the next candidate from the mean of the earlier ones.
            if place >= 2 and self._spent * (place + 1) / place > self._milliseconds:
                break
            yield Request(config, ROUNDS[0])
        remaining = self._possible_winners(self._candidate_set)
        for samples in ROUNDS[1:]:
            remaining = self._affordable(remaining, samples)[::-1]
            if len(remaining) < 2:
                return
            for config in remaining:
                yield Request(config, samples)
            remaining = self._possible_winners(remaining)

    def _possible_winners(self, candidates: Sequence[Config]) -> list[Config]:
        """Return the candidates that may be the fastest, beyond the indifference zone, in order."""
        medians = {
            config: self._median(config) for config in candidates if config.digest in self._samples
        }
        margin = self._margin([self._samples[config.digest] for config in medians])
        limit = min(medians.values(), default=0.0) * (1 + margin)
        return [config for config, median in medians.items() if median <= limit]

    def _affordable(self, candidates: Sequence[Config], samples: int) -> list[Config]:
        """Return the fastest candidates for which ``samples`` more samples fit into the time
        left."""
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

    def _margin(self, last: Sequence[Sequence[float]]) -> float:
        """Return the relative delay that noise may add; 0 if it is within the indifference zone.

        Args:
            last: the samples of each candidate of the last round.
        """
        repeated = [own for own in self._samples.values() if len(own) > 1]
        if not repeated:
            return _FIRST_MARGIN
        freedom = sum(len(own) - 1 for own in repeated)
        squares = sum(
            (statistics.stdev(o) / (statistics.fmean(o) or 1)) ** 2 * (len(o) - 1) for o in repeated
        )
        error = _STANDARD_ERRORS * math.sqrt(squares / freedom * 2 / min(map(len, last), default=1))
        if freedom < _MIN_DEGREES_OF_FREEDOM:
            return max(error, _MARGIN_FEW_DEGREES)
        return error if error > self._policy.indifference else 0.0
