"""Race the candidates: drop clear losers after one or two samples, decide the rest in a final.

Most configs of a space are much slower than the best, and one sample (the time of one run) shows
this. The race has four stages. In the table, *samples* counts all samples of a candidate up to the
end of the stage, and *slower* means slower than the fastest candidate. Numbers are for GPUs.

The clock of the GPU may drift during stage 1. Therefore stage 2 divides the candidates, in the
order of stage 1, into groups of 16, and first samples the three fastest of each. Then it samples
the others, fastest first, until it has taken 1/6 of the time of stage 1 and the next candidate is
slower by more than clock drift and noise explain.

=====  =======  ==================================================================================
stage  samples  candidates dropped
=====  =======  ==================================================================================
1      1        slower by more than a factor of three and by more than 0.5 ms
2      2        not sampled in stage 2, or slower by more than clock drift and noise explain
3      5        slower by more than noise explains, after each round; after the last round all but
                the fastest 16
final  11 - 75  slower by more than three standard errors, after each round
=====  =======  ==================================================================================

The final ends when one candidate is left. It also ends when two standard errors of a difference are
below a quarter of ``Policy.indifference``, or after ``repeat + max_extra_samples`` rounds. Only
candidates whose order is uncertain therefore get more than 11 samples.

A *round* visits each remaining candidate once, by default for one sample. Every other round visits
them in reverse order (A B C C B A). This spreads the samples of a candidate over time and puts
samples of different candidates next to each other. In the final, clock changes affect all samples
of a round alike and are removed (:mod:`~triton_dist._tuning.values.winner`). Earlier rounds take
longer, so :class:`Drift` removes the drift within each of them.

Before the final, a candidate is dropped when it is slower than the fastest by more than
``4 * noise * sqrt(2 / samples)``, which is four standard errors of the difference of two means.
Fewer would not suffice, because the fastest of many candidates is partly lucky. *Noise* is a
relative standard deviation: the third quartile, over the candidates, of the deviation of a
candidate's samples. Few candidates increase this margin, which is at least ``Policy.indifference``.

One delayed sample must neither drop a candidate nor change which is the fastest. With few samples,
each candidate is therefore judged by its lower median, and the fastest by its higher median.

The first config of the space (the default) and the incumbent (the winner of an earlier tuning)
always reach the final, so the winner is never slower than the default. If a config fails, it is
dropped, and all candidates that did not fail race again with the samples that they have.
:func:`triton_dist._tuning.values.winner` selects the winner.

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
from triton_dist._tuning.values.winner import estimate_levels, interquartile_mean

_BLOCK_SAMPLES = 16  # consecutive samples that share one estimate of the clock
_FIT_ITERATIONS = 10  # of the alternating estimate of slowdowns and times
_MAX_CLOCK_DEVIATION = 0.1
""":class:`Drift` ignores a sample with a larger relative deviation from its candidate's median."""


class Drift:
    """Estimate of the clock drift of the device, to remove the drift from samples.

    The samples are cut into *blocks* of 16 consecutive samples of any candidates. Candidates with
    samples in two or more blocks show how fast the device was in each of these blocks.
    """

    def __init__(self) -> None:
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        self._blocks: defaultdict[str, list[int]] = defaultdict(list)
        self._num_samples = 0
        self._slowdown: dict[int, float] = {}
        """By block: the time of a run in the block, divided by the run's mean time; about 1."""

    def add(self, digest: str, samples: Iterable[float]) -> None:
        """Add ``samples`` in milliseconds that directly follow the samples added before."""
        for time in samples:
            self._times[digest].append(time)
            self._blocks[digest].append(self._num_samples // _BLOCK_SAMPLES)
            self._num_samples += 1

    def first_block(self, digest: str) -> int:
        """Return the block of the candidate's first sample."""
        return self._blocks[digest][0]

    def fit(self, digests: Iterable[str]) -> None:
        """Estimate the slowdown of each block from the candidates with these digests.

        Estimate in turn the median of each candidate's samples without drift, and the slowdown of
        each block. Start from the slowdowns of the last fit.
        """
        sampled_twice = [digest for digest in digests if len(self._times[digest]) > 1]
        for _ in range(_FIT_ITERATIONS):
            ratios: defaultdict[int, list[float]] = defaultdict(list)
            for digest in sampled_twice:
                corrected = self.without_drift(digest)
                level = statistics.median(corrected) or 1.0
                for time, block in zip(corrected, self._blocks[digest], strict=True):
                    if abs(time / level - 1) < _MAX_CLOCK_DEVIATION:
                        ratios[block].append(time / level)
            # Means, not medians: if the clock steps in the middle of a block, a median follows one
            # half of the block and the fit does not converge.
            for block, each in ratios.items():
                self._slowdown[block] = self._slowdown.get(block, 1.0) * statistics.fmean(each)
            # Only ratios between blocks are known: normalise the mean to 1.
            mean = statistics.fmean(self._slowdown.values()) if self._slowdown else 1.0
            self._slowdown = {block: factor / mean for block, factor in self._slowdown.items()}

    def without_drift(self, digest: str) -> list[float]:
        """Return the samples of a candidate, each divided by the slowdown of its block."""
        times, blocks = self._times[digest], self._blocks[digest]
        return [
            time / self._slowdown.get(block, 1.0) for time, block in zip(times, blocks, strict=True)
        ]


MAX_SLOWDOWN_OF_FIRST_SAMPLE = 3.0
"""A candidate whose only sample is larger than this multiple of the fastest time is dropped. The
multiple is large because the noise is unknown after one sample."""
MAX_DELAY_MS = 0.5
"""Milliseconds by which a single sample may be late, because of a busy host or the first collective
of its size. A candidate that is slower by less is never dropped after one sample."""
CLOCK_JUMP = 0.06
"""Relative delay of a sample that a sudden clock change within its block may cause."""
SECOND_SAMPLE_SHARE = 1 / 6
"""Minimum time of stage 2 relative to stage 1, where one late sample can hide a good config."""
NUM_CLOCK_REFERENCES = 3
"""Candidates of each block of stage 1 whose second sample measures the clock of the block."""
NUM_STANDARD_ERRORS = 4.0
NUM_CANDIDATES_OF_DOUBLED_MARGIN = 3.0
"""Number of candidates at which the margin is doubled. It grows further with fewer candidates,
because few candidates measure the noise badly."""
MAX_FINALISTS = 16
MIN_FINAL_ROUNDS = 6
"""Rounds of the final before the first finalist is dropped. There are more of them than earlier
rounds, so most samples of a finalist were taken next to samples of the other finalists."""
NUM_STANDARD_ERRORS_IN_FINAL = 3.0
FINAL_ERROR_LIMIT = 0.25
"""The final ends when two standard errors are below this fraction of ``Policy.indifference``."""
_MIN_SAMPLES_FOR_MEAN = 5
"""Minimum number of samples with a meaningful interquartile mean."""


class IteratorSearch:
    """Base of searches that take their requests from the iterator ``_requests``."""

    runs_user_code = False
    _requests: Iterator[Request]
    _upcoming: Sequence[Config]

    def ask(self) -> Request | None:
        return next(self._requests, None)

    def upcoming_configs(self) -> Sequence[Config]:
        upcoming, self._upcoming = self._upcoming, ()
        return upcoming


class Racing(IteratorSearch):
    """Search that races the candidates in stages.

    Call :meth:`tell` for each request before the next :meth:`ask`. The first of the candidates is
    the default. ``policy`` sets the samples of each stage and limits the number of candidates.
    ``incumbent``, the winner of an earlier tuning, takes part if it is a candidate.
    """

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        self._policy = policy
        # The incumbent replaces the last of the `max_trials` candidates.
        candidates_to_race = list(candidates[: policy.max_trials])
        if (
            incumbent is not None
            and incumbent in candidates[len(candidates_to_race) :]
            and len(candidates_to_race) > 1
        ):
            candidates_to_race[-1] = incumbent
        self._candidates = candidates_to_race
        self._protected = {config.digest for config in (*self._candidates[:1], incumbent) if config}
        self._samples: dict[str, list[float]] = {config.digest: [] for config in self._candidates}
        self._drift = Drift()
        # Each request starts with `warmup` untimed runs, so it takes more samples at a time.
        self._samples_per_request = 1 + 2 * policy.warmup
        self._direction = 1  # order of the next round: 1 forward, -1 backward
        self._requests = self._race()
        self._upcoming = self._candidates

    def tell(self, request: Request, outcome: Outcome) -> None:
        digest = request.config.digest
        if isinstance(outcome, Failure):
            self._samples.pop(digest, None)
        else:
            self._samples[digest] += outcome.samples
            self._drift.add(digest, outcome.samples)

    def _race(self) -> Iterator[Request]:
        """Yield the requests. The next request depends on the outcomes received so far."""
        while True:
            yield from self._first_samples()
            num_valid = len(self._samples)
            yield from self._run_stages()
            if len(self._samples) == num_valid:
                return
            # A config that failed may have eliminated others: repeat without it.

    def _first_samples(self) -> Iterator[Request]:
        """Yield the requests of stage 1: none if it has already run."""
        return self._sample(self._candidates, self._policy.rounds[0])

    def _run_stages(self) -> Iterator[Request]:
        """Yield the requests from stage 2 on. Samples that a candidate has are not taken again."""
        first, *later = self._policy.rounds
        remaining: Sequence[Config] = self._candidates
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
            for index, config in enumerate(remaining)
            if index < MAX_FINALISTS or config.digest in self._protected
        ]
        max_samples = self._policy.rounds[-1] + self._policy.repeat + self._policy.max_extra_samples
        while len(remaining) > 1 and self._fewest_samples(remaining) < max_samples:
            yield from self._round(remaining, max_samples)
            remaining = self._possible_winners(remaining)

    def _second_samples(
        self, candidates: Sequence[Config]
    ) -> Generator[Request, None, Sequence[Config]]:
        """Yield the requests of stage 2; return the candidates with two samples."""
        blocks: dict[int, list[Config]] = {}
        for config in candidates:
            blocks.setdefault(self._drift.first_block(config.digest), []).append(config)
        # Interleave, so that each block of stage 2 contains candidates of many blocks of stage 1.
        columns = itertools.zip_longest(
            *(block[:NUM_CLOCK_REFERENCES] for block in blocks.values())
        )
        sampled = [config for column in columns for config in column if config is not None]
        sampled_digests = {config.digest for config in sampled}
        others = [config for config in candidates if config.digest not in sampled_digests]
        yield from self._sample(sampled, 2)
        affordable_ms = SECOND_SAMPLE_SHARE * self._one_run_each_ms(self._candidates)
        while others:
            self._drift.fit(self._digests(sampled))
            limit, ranked = self._limit_ms(sampled, 1, CLOCK_JUMP), self._ranked(others)
            spent = itertools.accumulate(
                map(self._low_estimate_ms, ranked), initial=self._one_run_each_ms(sampled)
            )
            others = [
                config
                for config, spent_ms in zip(ranked, spent, strict=False)
                if spent_ms <= affordable_ms or self._is_faster_than(config, limit)
            ]
            batch, others = others[: len(sampled)], others[len(sampled) :]
            yield from self._sample(batch, 2)
            sampled += batch
        return sampled

    def _round(self, remaining: Sequence[Config], max_samples: int) -> Iterator[Request]:
        """Yield the requests of a round, which brings each candidate to one total of samples: the
        fewest of any candidate plus ``_samples_per_request``, at most ``max_samples``."""
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
        fastest = self._low_estimate_ms(ranked[0])
        limit = max(MAX_SLOWDOWN_OF_FIRST_SAMPLE * fastest, fastest + MAX_DELAY_MS)
        return [config for config in ranked if self._is_faster_than(config, limit)]

    def _still_racing(self, candidates: Sequence[Config]) -> Sequence[Config]:
        """Return the candidates that may be the fastest, given the noise, fastest first."""
        self._drift.fit(self._digests(candidates))
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        limit = self._limit_ms(ranked, self._fewest_samples(ranked))
        return [config for config in ranked if self._is_faster_than(config, limit)]

    def _possible_winners(self, finalists: Sequence[Config]) -> Sequence[Config]:
        """Return the finalists that may be the fastest, or an empty list if the standard error is
        small enough to end the final."""
        remaining = [config for config in finalists if config.digest in self._samples]
        num_samples = self._fewest_samples(remaining)
        if num_samples < self._policy.rounds[-1] + MIN_FINAL_ROUNDS or not remaining:
            return remaining
        fitted = estimate_levels([self._samples[config.digest] for config in remaining])
        fastest, error = min(fitted.ms), fitted.standard_error(num_samples, num_samples)
        if 2 * error <= FINAL_ERROR_LIMIT * self._policy.indifference * abs(fastest):
            return []
        limit = fastest + NUM_STANDARD_ERRORS_IN_FINAL * error
        return [c for c, level in zip(remaining, fitted.ms, strict=True) if level <= limit]

    def _digests(self, candidates: Iterable[Config]) -> list[str]:
        digests = (config.digest for config in candidates)
        return [digest for digest in digests if digest in self._samples]

    def _fewest_samples(self, candidates: Iterable[Config]) -> int:
        return min((len(self._samples[each]) for each in self._digests(candidates)), default=0)

    def _one_run_each_ms(self, candidates: Iterable[Config]) -> float:
        return sum(self._samples[digest][0] for digest in self._digests(candidates))

    def _ranked(self, candidates: Iterable[Config]) -> list[Config]:
        """Return the candidates that did not fail, fastest first; ties keep the order of the
        space."""
        valid = [config for config in candidates if config.digest in self._samples]
        return sorted(valid, key=self._low_estimate_ms)

    def _is_faster_than(self, config: Config, limit: float) -> bool:
        return config.digest in self._protected or self._low_estimate_ms(config) <= limit

    def _low_estimate_ms(self, config: Config) -> float:
        """Return the typical time of a run. With few samples, use the lower median: the slower
        samples may have been late."""
        corrected = self._drift.without_drift(config.digest)
        return (
            interquartile_mean(corrected)
            if len(corrected) >= _MIN_SAMPLES_FOR_MEAN
            else statistics.median_low(corrected)
        )

    def _high_estimate_ms(self, digest: str) -> float:
        """Return the typical time of a run. With few samples, use the higher median: the faster
        samples may have been lucky."""
        corrected = self._drift.without_drift(digest)
        return (
            interquartile_mean(corrected)
            if len(corrected) >= _MIN_SAMPLES_FOR_MEAN
            else statistics.median_high(corrected)
        )

    def _limit_ms(
        self, candidates: Sequence[Config], samples: int, min_margin: float = 0.0
    ) -> float:
        """Return the milliseconds above which a candidate with ``samples`` samples is dropped.

        The limit exceeds the fastest of ``candidates`` by at least the fraction ``min_margin``.
        """
        digests = self._digests(candidates)
        noise = sorted(
            statistics.stdev(each) / (statistics.fmean(each) or 1.0)
            for each in map(self._drift.without_drift, digests)
            if len(each) > 1
        )
        third_quartile = noise[3 * (len(noise) - 1) // 4] if noise else 0.0
        margin_factor = 1 + NUM_CANDIDATES_OF_DOUBLED_MARGIN / max(len(noise), 1)
        margin = (
            NUM_STANDARD_ERRORS * margin_factor * third_quartile * math.sqrt(2 / max(samples, 1))
        )
        fastest = min(map(self._high_estimate_ms, digests), default=math.inf)
        return fastest * (1 + max(margin, self._policy.indifference, min_margin))
