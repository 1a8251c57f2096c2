"""Candidates race: clear losers leave after a run or two, the best few meet in a final.

Most of a config space is far from its best, and one sample shows that. So samples are given in
rounds, each to the candidates that are left (the numbers are those of GPUs):

=====  ===============  ==========================================================================
round  samples in all   leaves
=====  ===============  ==========================================================================
1      1                who took more than twice as long as the fastest, by half a millisecond
2, 3   2, then 5        who is behind by more than the noise explains; after 3 all but the first 8
final  5 + ``repeat``   nobody: finalists are measured in turn, forward and backward (A B C C B A),
                        so that drifting clocks and temperature hit all alike
=====  ===============  ==========================================================================

A candidate stands where its median stands, of two samples the lower: noise on a device is mostly
delay, and one hiccup must not end a race. *Noise* is the relative standard deviation of the samples
of one candidate, the third quartile over those in the round (a few samples tell little about one
candidate's own noise, but the candidates together tell it well; the quartile is for spaces in which
some are noisier). A candidate leaves when it is behind the leader by more than ``4 * noise *
sqrt(2 / samples)``: four standard errors of the difference of two means, because the leader of many
is partly a lucky one. It is never less than the indifference zone.

The first config of the space (the default) and the incumbent never leave, so a tuning cannot do
worse than not tuning. What failed leaves at once, and whom it put out of the race is called back.
Who wins is not decided here: :func:`triton_dist._tuning.values.winner`.

Replayed on recorded spaces (``benchmarks/bench_tuning.py``, which counts the first run of every
candidate too), this takes 0.14 of the device time of 5 + 10 runs of each config where the space is
peaked (convolution; 0.13 is the floor set by one first run and one sample) and 0.21 where it is
flat (dedispersion), with a 95th percentile of regret below that of 5 + 10. The constants were
chosen on random parts of two of the spaces and on other seeds. They matter little: a margin of 3 to
6 standard errors and 6 to 12 finalists are within noise of one another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence

from triton_dist._tuning.values import Config, Failure, Outcome, Policy, Request

CLEARLY_SLOWER = 2.0
"""Times the fastest, after a single sample, when the noise is not known yet."""
HICCUP = 0.5
"""Milliseconds that a single sample may be late: a first collective of its size, a host that was
busy. Behind by less, nobody leaves after one sample; the second costs no more than that."""
STANDARD_ERRORS = 4.0
FINALISTS = 8


class Racing:
    """A race of the candidates.

    No clock and no randomness: with the same outcomes it asks for the same. Each request is
    answered before the next is asked for.

    Args:
        candidates: in the order of the space; the first is the default.
        policy: its ``rounds``, and ``repeat`` samples for each finalist in the final; only
            ``max_trials`` candidates take part.
        incumbent: winner of an earlier tuning; takes part if it is a candidate.
    """

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        self._policy = policy
        self._field = _entrants(candidates, policy.max_trials, incumbent)
        self._seeded = {config.digest for config in (*self._field[:1], incumbent) if config}
        self._samples: dict[str, list[float]] = {config.digest: [] for config in self._field}
        self._requests = self._race()

    def ask(self) -> Request | None:
        return next(self._requests, None)

    def tell(self, request: Request, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            self._samples.pop(request.config.digest, None)
        else:
            self._samples[request.config.digest] += outcome.samples

    def _race(self) -> Iterator[Request]:
        """Every request, in order; what was told meanwhile decides how it goes on."""
        yield from self._each(self._field, self._policy.rounds[0])
        while True:
            valid = len(self._samples)
            yield from self._run(self._field)
            if len(self._samples) == valid:
                return
            # Who failed may have put others out of the race: once more without it.

    def _run(self, left: Sequence[Config]) -> Iterator[Request]:
        """From the first round to the final; who has samples is asked for those missing alone."""
        for total in self._policy.rounds:
            yield from self._each(left, total)
            left = self._still_racing(left, total)
        left = self._finalists(left)
        if len(left) > 1:
            lap = math.ceil(self._policy.repeat / 2)
            yield from self._each(left, self._policy.rounds[-1] + lap)
            yield from self._each(left[::-1], self._policy.rounds[-1] + 2 * lap)

    def _each(self, candidates: Iterable[Config], total: int) -> Iterator[Request]:
        """Bring each to ``total`` samples."""
        for config in candidates:
            samples = self._samples.get(config.digest)  # none if it failed since the round began
            if samples is not None and len(samples) < total:
                yield Request(config, total - len(samples))

    def _still_racing(self, candidates: Sequence[Config], samples: int) -> list[Config]:
        """Candidates that are not clearly slower, the fastest first: a tuning whose time is up in
        the middle of a round has measured those that count."""
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        fastest = self._standing(ranked[0])
        if samples == 1:
            limit = max(CLEARLY_SLOWER * fastest, fastest + HICCUP)
        else:
            limit = fastest * (1 + self._margin(ranked, samples))
        return [
            config
            for config in ranked
            if self._standing(config) <= limit or config.digest in self._seeded
        ]

    def _finalists(self, candidates: Sequence[Config]) -> list[Config]:
        return [
            config
            for place, config in enumerate(self._ranked(candidates))
            if place < FINALISTS or config.digest in self._seeded
        ]

    def _ranked(self, candidates: Sequence[Config]) -> list[Config]:
        """Candidates that did not fail, the fastest first. Sorting is stable: from the second
        round on equals keep their places, which began as those in the space."""
        return sorted(
            (config for config in candidates if config.digest in self._samples), key=self._standing
        )

    def _standing(self, config: Config) -> float:
        """Milliseconds."""
        return statistics.median_low(self._samples[config.digest])

    def _margin(self, candidates: Sequence[Config], samples: int) -> float:
        """Relative delay that noise may add to an equal of the leader."""
        noise = sorted(
            statistics.stdev(own) / (statistics.fmean(own) or 1.0)
            for own in (self._samples[config.digest] for config in candidates)
        )
        third_quartile = noise[3 * (len(noise) - 1) // 4]
        margin = STANDARD_ERRORS * third_quartile * math.sqrt(2 / samples)
        return max(margin, self._policy.indifference)


def _entrants(
    candidates: Sequence[Config], max_trials: int | None, incumbent: Config | None
) -> list[Config]:
    """At most ``max_trials`` of them: the first, the last of which makes room for the incumbent."""
    entrants = list(candidates[:max_trials])
    if incumbent is not None and incumbent in candidates[len(entrants) :] and len(entrants) > 1:
        entrants[-1] = incumbent
    return entrants
