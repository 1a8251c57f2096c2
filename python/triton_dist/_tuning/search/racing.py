"""Race the candidates: drop clear losers after one or two samples, decide the rest in a final.

Most configs of a space are much slower than the best, and one sample shows this. The race has
stages (numbers: the defaults on GPUs):

=====  ===============  ==========================================================================
stage  total samples    candidates dropped
=====  ===============  ==========================================================================
1      1                slower than three times the fastest, and by more than 0.5 ms
2      2                slower by more than clock drift and noise explain. First sampled: the three
                        fastest candidates of each block of stage 1. Then sampled: the fastest of
                        the rest, while they are close or fit into 1/6 of the time of stage 1
3      5, one a round   slower by more than noise explains, after each round; after the last round
                        all but the first 16
final  11, at most      slower by more than three standard errors, after each round. The final ends
       5 + ``repeat``   when two standard errors are below a quarter of the indifference zone, so
       + ``tie_break``  only candidates whose order is uncertain get more samples
=====  ===============  ==========================================================================

A *round* takes one sample of each remaining candidate, forward, and the next round backward
(A B C C B A). This spreads the samples of a candidate over time and puts samples of different
candidates next to each other. Clock changes affect all samples of a round alike and are removed
(:mod:`~triton_dist._tuning.values.winner`). A round before the final is long, so :class:`Drift`
removes the drift within it.

Before the final, a candidate is dropped when it is slower than the fastest by more than
``4 * noise * sqrt(2 / samples)``. This is four standard errors of the difference of two means,
because the fastest of many candidates is partly lucky. *Noise* is the relative standard deviation
of the samples of one candidate. The race uses its third quartile over the candidates, and more if
there are few candidates. The margin is never below the indifference zone.

One late sample must neither drop a candidate nor change the fastest. With few samples, the time of
a candidate to drop is therefore its lower median, and the time of the fastest its higher median.

The first config of the space (the default) and the incumbent always reach the final, so the winner
is never slower than the default. A failing config is dropped, and the configs that it eliminated
re-enter the race. :func:`triton_dist._tuning.values.winner` selects the winner.

``benchmarks/bench_search_quality.py`` replays races on recorded spaces under changing clocks; the
results are in ``docs/explanation/measuring.md``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence

from triton_dist._tuning.values import Config, Failure, Outcome, Policy, Request
from triton_dist._tuning.values.winner import levels, typical

_BLOCK_SAMPLES = 16
_FIT_ITERATIONS = 10
_MAX_CLOCK_DEVIATION = 0.1
"""A sample whose relative deviation from the level of its candidate is larger is late for another
reason than the clocks, and is ignored."""


class Drift:
    """Estimate of the clock drift of the device, to remove it from samples.

    Time is cut into *blocks* of consecutive samples. Candidates with samples in two or more blocks
    show how fast the device was in each of them.
    """

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._blocks: defaultdict[str, list[int]] = defaultdict(list)
        self._num_samples = 0
        self._speed: dict[int, float] = {}
        """By block, the factor by which runs took longer, about 1."""

    def add(self, digest: str, samples: Iterable[float]) -> None:
        """Add consecutive ``samples`` in milliseconds, taken now."""
        for time in samples:
            self._times[digest].append(time)
            self._blocks[digest].append(self._num_samples // _BLOCK_SAMPLES)
            self._num_samples += 1

    def first_block(self, digest: str) -> int:
        """Return the block of the first sample."""
        return self._blocks[digest][0]

    def fit(self, digests: Iterable[str]) -> None:
        """Fit the levels of these candidates and the speeds of the blocks alternately, starting at
        the last fit."""
        several = [digest for digest in digests if len(self._times[digest]) > 1]
        for _ in range(_FIT_ITERATIONS):
            ratios: defaultdict[int, list[float]] = defaultdict(list)
            for digest in several:
                steady = self.without_drift(digest)
                level = statistics.median(steady) or 1.0
                for time, block in zip(steady, self._blocks[digest], strict=True):
                    if abs(time / level - 1) < _MAX_CLOCK_DEVIATION:
                        ratios[block].append(time / level)
            # Means, not medians: if the clock steps in the middle of a block, a median follows one
            # of the two halves and the fit does not converge.
            for block, each in ratios.items():
                self._speed[block] = self._speed.get(block, 1.0) * statistics.fmean(each)
            # Only ratios between blocks are known: normalise the mean to 1.
            mean = statistics.fmean(self._speed.values()) if self._speed else 1.0
            self._speed = {block: speed / mean for block, speed in self._speed.items()}

    def without_drift(self, digest: str) -> list[float]:
        """Return the samples of a candidate without the known drift."""
        times, blocks = self._times[digest], self._blocks[digest]
        return [
            time / self._speed.get(block, 1.0) for time, block in zip(times, blocks, strict=True)
        ]


CLEARLY_SLOWER = 3.0
"""Multiple of the fastest time that drops a candidate after one sample (noise is unknown then)."""
LATE_MS = 0.5
"""Milliseconds by which a single sample may be late, because of a busy host or the first collective
of its size. A candidate that is slower by less is never dropped after one sample."""
CLOCK_JUMP = 0.06
"""Relative delay of a single sample that a jump of the clocks within a block may explain."""
SECOND_SAMPLE_SHARE = 1 / 6
"""Share of the time of stage 1 that is always spent on second samples, because one late sample can
make a good config look slow."""
CLOCK_REFERENCES = 3
"""Candidates of each block of stage 1 whose second sample measures the clock of that block."""
STANDARD_ERRORS = 4.0
FEW_CANDIDATES = 3.0
"""Number of candidates for which the margin is doubled, because few candidates measure the noise
badly."""
FINALISTS = 16
MIN_FINAL_ROUNDS = 6
"""Rounds of the final before a candidate is dropped. The number exceeds the samples before the
final, so most samples of a finalist were taken next to samples of the other finalists."""
STANDARD_ERRORS_IN_FINAL = 3.0
FINAL_PRECISION = 0.25
"""Fraction of the indifference zone; the final ends when two standard errors are below it."""
_MIN_SAMPLES_FOR_MEAN = 5
"""Minimum number of samples with a meaningful interquartile mean."""


class IteratorSearch:
    """Base of searches that yield their requests from the iterator ``_requests``."""

    runs_user_code = False
    _requests: Iterator[Request]
    _ahead: Sequence[Config]

    def ask(self) -> Request | None:
        return next(self._requests, None)

    def ahead(self) -> Sequence[Config]:
        named, self._ahead = self._ahead, ()
        return named


class Racing(IteratorSearch):
    """Search that races the candidates in stages.

    Deterministic: equal outcomes lead to equal requests. Each request is answered before the next
    one is made.

    Args:
        candidates: in the order of the space; the first one is the default.
        policy: ``rounds``, ``repeat`` and ``tie_break`` set the samples of each stage;
            ``max_trials`` limits the number of candidates.
        incumbent: the winner of an earlier tuning; takes part if it is a candidate.
    """

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        self._policy = policy
        # The incumbent replaces the last of the `max_trials` candidates.
        entrants = list(candidates[: policy.max_trials])
        if incumbent is not None and incumbent in candidates[len(entrants) :] and len(entrants) > 1:
            entrants[-1] = incumbent
        self._candidate_set = entrants
        self._protected = {
            config.digest for config in (*self._candidate_set[:1], incumbent) if config
        }
        self._samples: dict[str, list[float]] = {
            config.digest: [] for config in self._candidate_set
        }
        self._drift = Drift()
        # Samples per request: with untimed warm-up runs, each request takes more timed runs.
        self._samples_per_request = 1 + 2 * policy.warmup
        self._direction = 1  # order of the next round
        self._requests = self._race()
        self._ahead = self._candidate_set

    def tell(self, request: Request, outcome: Outcome) -> None:
        digest = request.config.digest
        if isinstance(outcome, Failure):
            self._samples.pop(digest, None)
        else:
            self._samples[digest] += outcome.samples
            self._drift.add(digest, outcome.samples)

    def _race(self) -> Iterator[Request]:
        """Yield the requests; outcomes received meanwhile decide which come next."""
        yield from self._sample(self._candidate_set, self._policy.rounds[0])
        while True:
            valid = len(self._samples)
            yield from self._run()
            if len(self._samples) == valid:
                return
            # A config that failed may have eliminated others: repeat without it.

    def _run(self) -> Iterator[Request]:
        """Yield the requests of all stages; candidates with samples get only the missing ones."""
        first, *later = self._policy.rounds
        remaining: Sequence[Config] = self._candidate_set
        if first == 1:
            remaining = self._not_clearly_slower(remaining)
            if later:
                remaining = yield from self._second_samples(remaining)
        remaining = self._still_racing(remaining)
        while remaining and later and self._fewest_samples(remaining) < later[-1]:
            yield from self._round(remaining, later[-1])
            remaining = self._still_racing(remaining)
        remaining = [
            config
            for place, config in enumerate(remaining)
            if place < FINALISTS or config.digest in self._protected
        ]
        max_samples = self._policy.rounds[-1] + self._policy.repeat + self._policy.tie_break
        while len(remaining) > 1 and self._fewest_samples(remaining) < max_samples:
            yield from self._round(remaining, max_samples)
            remaining = self._possible_winners(remaining)

    def _second_samples(
        self, candidates: Sequence[Config]
    ) -> Generator[Request, None, Sequence[Config]]:
        """Run stage 2; return the candidates that took part."""
        blocks: dict[int, list[Config]] = {}
        for config in candidates:
            blocks.setdefault(self._drift.first_block(config.digest), []).append(config)
        # Interleave, so that each block of stage 2 contains candidates of many blocks of stage 1.
        columns = itertools.zip_longest(*(block[:CLOCK_REFERENCES] for block in blocks.values()))
        seen = [config for column in columns for config in column if config is not None]
        known = {config.digest for config in seen}
        others = [config for config in candidates if config.digest not in known]
        yield from self._sample(seen, 2)
        affordable = SECOND_SAMPLE_SHARE * self._time_of(self._candidate_set)
        while others:
            self._drift.fit(self._digests(seen))
            limit, ranked = self._limit(seen, 1, CLOCK_JUMP), self._ranked(others)
            spent = itertools.accumulate(
                map(self._optimistic_ms, ranked), initial=self._time_of(seen)
            )
            others = [
                config
                for config, before in zip(ranked, spent, strict=False)
                if before <= affordable or self._is_within(config, limit)
            ]
            now, others = others[: len(seen)], others[len(seen) :]
            yield from self._sample(now, 2)
            seen += now
        return seen

    def _round(self, remaining: Sequence[Config], max_samples: int) -> Iterator[Request]:
        """Take one more sample of each, up to ``max_samples``; those with fewer catch up."""
        yield from self._sample(
            remaining[:: self._direction],
            min(self._fewest_samples(remaining) + self._samples_per_request, max_samples),
        )
        self._direction = -self._direction

    def _sample(self, candidates: Iterable[Config], total: int) -> Iterator[Request]:
        """Yield the requests that bring each candidate to ``total`` samples."""
        for config in candidates:
            samples = self._samples.get(config.digest)  # missing if it failed in this round
            if samples is not None and len(samples) < total:
                yield Request(config, total - len(samples))

    def _not_clearly_slower(self, candidates: Sequence[Config]) -> Sequence[Config]:
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        fastest = self._optimistic_ms(ranked[0])
        limit = max(CLEARLY_SLOWER * fastest, fastest + LATE_MS)
        return [config for config in ranked if self._is_within(config, limit)]

    def _still_racing(self, candidates: Sequence[Config]) -> Sequence[Config]:
        """Return the candidates that may be the fastest, given the noise.

        The fastest are first, so they have more samples if time runs out in a round.
        """
        self._drift.fit(self._digests(candidates))
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        limit = self._limit(ranked, self._fewest_samples(ranked))
        return [config for config in ranked if self._is_within(config, limit)]

    def _possible_winners(self, finalists: Sequence[Config]) -> Sequence[Config]:
        """Return the finalists that may be the fastest, or nothing if their order is certain enough
        to end the final."""
        remaining = [config for config in finalists if config.digest in self._samples]
        taken = self._fewest_samples(remaining)
        if taken < self._policy.rounds[-1] + MIN_FINAL_ROUNDS or not remaining:
            return remaining
        found = levels([self._samples[config.digest] for config in remaining])
        fastest, error = min(found.level), found.standard_error(taken, taken)
        if 2 * error <= FINAL_PRECISION * self._policy.indifference * abs(fastest):
            return []
        limit = fastest + STANDARD_ERRORS_IN_FINAL * error
        return [c for c, level in zip(remaining, found.level, strict=True) if level <= limit]

    def _digests(self, candidates: Iterable[Config]) -> list[str]:
        """Return the digests of the candidates that did not fail."""
        digests = (config.digest for config in candidates)
        return [digest for digest in digests if digest in self._samples]

    def _fewest_samples(self, candidates: Iterable[Config]) -> int:
        """Return the smallest number of samples of a candidate."""
        return min((len(self._samples[each]) for each in self._digests(candidates)), default=0)

    def _time_of(self, candidates: Iterable[Config]) -> float:
        """Return the milliseconds of one run of each candidate."""
        return sum(self._samples[digest][0] for digest in self._digests(candidates))

    def _ranked(self, candidates: Iterable[Config]) -> list[Config]:
        """Return the candidates that did not fail, fastest first; ties keep the order of the
        space."""
        valid = [config for config in candidates if config.digest in self._samples]
        return sorted(valid, key=self._optimistic_ms)

    def _is_within(self, config: Config, limit: float) -> bool:
        return config.digest in self._protected or self._optimistic_ms(config) <= limit

    def _optimistic_ms(self, config: Config) -> float:
        """Return the time of a run; with few samples, assume that the slower ones were late."""
        steady = self._drift.without_drift(config.digest)
        return (
            typical(steady)
            if len(steady) >= _MIN_SAMPLES_FOR_MEAN
            else statistics.median_low(steady)
        )

    def _pessimistic_ms(self, digest: str) -> float:
        """Return the time of a run; with few samples, assume that the faster ones were lucky."""
        steady = self._drift.without_drift(digest)
        return (
            typical(steady)
            if len(steady) >= _MIN_SAMPLES_FOR_MEAN
            else statistics.median_high(steady)
        )

    def _limit(self, candidates: Sequence[Config], samples: int, min_margin: float = 0.0) -> float:
        """Return the milliseconds above which a candidate with this number of samples is dropped.
        ``min_margin``: smallest relative margin over the fastest of ``candidates``."""
        digests = self._digests(candidates)
        noise = sorted(
            statistics.stdev(own) / (statistics.fmean(own) or 1.0)
            for own in map(self._drift.without_drift, digests)
            if len(own) > 1
        )
        third_quartile = noise[3 * (len(noise) - 1) // 4] if noise else 0.0
        caution = 1 + FEW_CANDIDATES / max(len(noise), 1)
        margin = STANDARD_ERRORS * caution * third_quartile * math.sqrt(2 / max(samples, 1))
        fastest = min(map(self._pessimistic_ms, digests), default=math.inf)
        return fastest * (1 + max(margin, self._policy.indifference, min_margin))
