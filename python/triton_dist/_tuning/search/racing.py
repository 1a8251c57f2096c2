"""Candidates race: clear losers leave after a run or two, the best few meet in a final.

Most of a config space is far from its best, and one sample shows that. So samples are given in
rounds, each to the candidates that are left (the numbers are those of GPUs):

=====  ===============  ==========================================================================
round  samples in all   leaves
=====  ===============  ==========================================================================
1      1                who took more than three times as long as the fastest, by half a millisecond
2      2                who is behind by more than clocks and noise explain: asked for are the three
                        fastest of each part of round 1, then the fastest of all: who is close, and
                        so many that they take a sixth of the time of round 1
3      5, one a lap     who is behind by more than the noise explains, after each lap; after the
                        last all but the first 16
final  11, and at most  who is behind by more than three standard errors, after each lap; all, when
       5 + ``repeat``   two standard errors are less than a quarter of the indifference zone. So
       + ``doubt``      more samples are taken only of those whose order is in doubt
=====  ===============  ==========================================================================

A *lap* is a sample of each that is left, forward, the next lap backward (A B C C B A). So samples
of one candidate are spread over time, and those of different candidates are taken next to each
other. What all samples of a lap have in common is caused by the clocks, and is removed
(:mod:`~triton_dist._tuning.values.winner`). Before the final a lap takes long, and :class:`Drift`
removes the drift of the clocks within it.

Until the final a candidate leaves when it is behind another by more than ``4 * noise * sqrt(2 /
samples)``: four standard errors of the difference of two means, because the leader of many is
partly a lucky one. One hiccup must neither end a race nor make a leader: of few samples the lower
of the middle two count for who may leave, and the higher for who leads. *Noise* is the relative
standard deviation of the samples of one candidate, the third quartile over those in the round (a
few samples tell little about one candidate's own noise, but many candidates together tell it well;
of few candidates more is made). The margin is never less than the indifference zone.

The first config of the space (the default) and the incumbent are in the final, so a tuning cannot
do worse than not tuning. What failed leaves at once, and whom it put out of the race is called
back. Who wins is not decided here: :func:`triton_dist._tuning.values.winner`.

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

_BLOCK = 16
_PASSES = 10
_HICCUP = 0.1
"""A sample that is further from its candidate's level, relatively, is no matter of clocks."""


class Drift:
    """Removes the drift of the device's clocks from samples in milliseconds.

    Time is cut into *blocks* of consecutive samples. Candidates with samples in two or more blocks
    show how fast the device was in each of them.
    """

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


CLEARLY_SLOWER = 3.0
"""Times the fastest, after a single sample, when the noise is not known yet."""
HICCUP = 0.5
"""Milliseconds that a single sample may be late: a first collective of its size, a host that was
busy. Behind by less, nobody leaves after one sample; the second costs no more than that."""
CLOCKS = 0.06
"""Relative delay of a single sample that may be the clocks', of a block in which they jumped."""
SPARE = 1 / 6
"""Part of the time of the first round that is spent on second samples in any case, of the fastest:
one that is good and was late once may stand far behind the others in a space with few good ones."""
TELLERS = 3
"""So many of each block of the first round tell by a second sample how fast its clocks were."""
STANDARD_ERRORS = 4.0
FEW_TELL_LITTLE = 3.0
"""So many candidates more would have to be asked, if it were as many again, how noisy it is."""
FINALISTS = 16
LEAST_ROUNDS = 6
"""Laps of the final before anybody leaves it: more than the samples before it, so that who was not
in it does not win by samples of which none was taken beside the others' (it has less than half)."""
STANDARD_ERRORS_IN_FINAL = 3.0
SURE = 0.25
"""Part of the indifference zone below which two standard errors decide nothing any more."""
_FEW = 5
"""Samples of fewer have no middle half worth the name."""


class Requesting:
    """A search whose requests come from an iterator, ``_requests``."""

    runs_user_code = False
    _requests: Iterator[Request]
    _ahead: Sequence[Config]

    def ask(self) -> Request | None:
        return next(self._requests, None)

    def ahead(self) -> Sequence[Config]:
        named, self._ahead = self._ahead, ()
        return named


class Racing(Requesting):
    """A race of the candidates.

    No clock and no randomness: with the same outcomes it asks for the same. Each request is
    answered before the next is asked for.

    Args:
        candidates: in the order of the space; the first is the default.
        policy: its ``rounds``, and ``repeat`` laps of the final and ``doubt`` more; only
            ``max_trials`` candidates take part.
        incumbent: winner of an earlier tuning; takes part if it is a candidate.
    """

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        self._policy = policy
        # The last of at most `max_trials` makes room for the incumbent.
        entrants = list(candidates[: policy.max_trials])
        if incumbent is not None and incumbent in candidates[len(entrants) :] and len(entrants) > 1:
            entrants[-1] = incumbent
        self._candidate_set = entrants
        self._seeded = {config.digest for config in (*self._candidate_set[:1], incumbent) if config}
        self._samples: dict[str, list[float]] = {
            config.digest: [] for config in self._candidate_set
        }
        self._drift = Drift()
        # Of each in a lap. Runs that do not count come with each request: then more that do.
        self._step = 1 + 2 * policy.warmup
        self._direction = 1  # of the next lap
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
        """Every request, in order; what was told meanwhile decides how it goes on."""
        yield from self._each(self._candidate_set, self._policy.rounds[0])
        while True:
            valid = len(self._samples)
            yield from self._run()
            if len(self._samples) == valid:
                return
            # Who failed may have put others out of the race: once more without it.

    def _run(self) -> Iterator[Request]:
        """From the first round to the final; who has samples is asked for those missing alone."""
        first, *later = self._policy.rounds
        left: Sequence[Config] = self._candidate_set
        if first == 1:
            left = self._not_clearly_slower(left)
            if later:
                left = yield from self._second_look(left)
        left = self._still_racing(left)
        while left and later and self._least(left) < later[-1]:
            yield from self._round(left, later[-1])
            left = self._still_racing(left)
        left = [
            config
            for place, config in enumerate(left)
            if place < FINALISTS or config.digest in self._seeded
        ]
        most = self._policy.rounds[-1] + self._policy.repeat + self._policy.doubt
        while len(left) > 1 and self._least(left) < most:
            yield from self._round(left, most)
            left = self._in_doubt(left)

    def _second_look(
        self, candidates: Sequence[Config]
    ) -> Generator[Request, None, Sequence[Config]]:
        """The second round; returns those that took part."""
        blocks: dict[int, list[Config]] = {}
        for config in candidates:
            blocks.setdefault(self._drift.first_block(config.digest), []).append(config)
        # In turn, so that each block of the second round meets many of the first.
        columns = itertools.zip_longest(*(block[:TELLERS] for block in blocks.values()))
        seen = [config for column in columns for config in column if config is not None]
        told = {config.digest for config in seen}
        others = [config for config in candidates if config.digest not in told]
        yield from self._each(seen, 2)
        spare = SPARE * self._time_of(self._candidate_set)
        while others:
            self._drift.fit(self._digests(seen))
            limit, ranked = self._limit(seen, 1, CLOCKS), self._ranked(others)
            spent = itertools.accumulate(map(self._better, ranked), initial=self._time_of(seen))
            others = [
                config
                for config, before in zip(ranked, spent, strict=False)
                if before <= spare or self._stays(config, limit)
            ]
            now, others = others[: len(seen)], others[len(seen) :]
            yield from self._each(now, 2)
            seen += now
        return seen

    def _round(self, left: Sequence[Config], most: int) -> Iterator[Request]:
        """One sample more of each, up to ``most``; of whom others are ahead of, so many more."""
        yield from self._each(left[:: self._direction], min(self._least(left) + self._step, most))
        self._direction = -self._direction

    def _each(self, candidates: Iterable[Config], total: int) -> Iterator[Request]:
        """Bring each to ``total`` samples."""
        for config in candidates:
            samples = self._samples.get(config.digest)  # none if it failed since the round began
            if samples is not None and len(samples) < total:
                yield Request(config, total - len(samples))

    def _not_clearly_slower(self, candidates: Sequence[Config]) -> Sequence[Config]:
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        fastest = self._better(ranked[0])
        limit = max(CLEARLY_SLOWER * fastest, fastest + HICCUP)
        return [config for config in ranked if self._stays(config, limit)]

    def _still_racing(self, candidates: Sequence[Config]) -> Sequence[Config]:
        """Candidates that noise may have held up, the fastest first: a tuning whose time is up in
        the middle of a round has measured those that count."""
        self._drift.fit(self._digests(candidates))
        ranked = self._ranked(candidates)
        if not ranked:
            return []
        limit = self._limit(ranked, self._least(ranked))
        return [config for config in ranked if self._stays(config, limit)]

    def _in_doubt(self, finalists: Sequence[Config]) -> Sequence[Config]:
        """Finalists that may be first; none if it is all the same who is."""
        left = [config for config in finalists if config.digest in self._samples]
        taken = self._least(left)
        if taken < self._policy.rounds[-1] + LEAST_ROUNDS or not left:
            return left
        found = levels([self._samples[config.digest] for config in left])
        fastest, doubt = min(found.level), found.doubt(taken, taken)
        if 2 * doubt <= SURE * self._policy.indifference * abs(fastest):
            return []
        limit = fastest + STANDARD_ERRORS_IN_FINAL * doubt
        return [c for c, level in zip(left, found.level, strict=True) if level <= limit]

    def _digests(self, candidates: Iterable[Config]) -> list[str]:
        """Digests of those that did not fail."""
        digests = (config.digest for config in candidates)
        return [digest for digest in digests if digest in self._samples]

    def _least(self, candidates: Iterable[Config]) -> int:
        """Samples of the one with the fewest."""
        return min((len(self._samples[each]) for each in self._digests(candidates)), default=0)

    def _time_of(self, candidates: Iterable[Config]) -> float:
        """Milliseconds of a run of each."""
        return sum(self._samples[digest][0] for digest in self._digests(candidates))

    def _ranked(self, candidates: Iterable[Config]) -> list[Config]:
        """Candidates that did not fail, the fastest first; equals keep their places, which began as
        those in the space."""
        valid = [config for config in candidates if config.digest in self._samples]
        return sorted(valid, key=self._better)

    def _stays(self, config: Config, limit: float) -> bool:
        return config.digest in self._seeded or self._better(config) <= limit

    def _better(self, config: Config) -> float:
        """Milliseconds that it takes if its few samples were held up."""
        steady = self._drift.steadied(config.digest)
        return typical(steady) if len(steady) >= _FEW else statistics.median_low(steady)

    def _worse(self, digest: str) -> float:
        """Milliseconds that it takes if its few samples were lucky."""
        steady = self._drift.steadied(digest)
        return typical(steady) if len(steady) >= _FEW else statistics.median_high(steady)

    def _limit(self, candidates: Sequence[Config], samples: int, least: float = 0.0) -> float:
        """Milliseconds above which one with so many samples leaves; ``least``: relative to the
        fastest of ``candidates``."""
        digests = self._digests(candidates)
        noise = sorted(
            statistics.stdev(own) / (statistics.fmean(own) or 1.0)
            for own in map(self._drift.steadied, digests)
            if len(own) > 1
        )
        third_quartile = noise[3 * (len(noise) - 1) // 4] if noise else 0.0
        sureness = 1 + FEW_TELL_LITTLE / max(len(noise), 1)
        margin = STANDARD_ERRORS * sureness * third_quartile * math.sqrt(2 / max(samples, 1))
        fastest = min(map(self._worse, digests), default=math.inf)
        return fastest * (1 + max(margin, self._policy.indifference, least))
