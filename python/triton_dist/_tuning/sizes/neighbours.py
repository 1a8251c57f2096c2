"""Predict good configs for a new key from keys that differ only in size.

The first call of a key with tuned neighbours races a few configs that are near the best at the
neighbouring sizes, for some milliseconds, instead of all candidates for seconds. If nothing can be
measured (frozen mode, graph capture), the records of the neighbours decide alone.

Latencies are extrapolated from a neighbour by the number of waves, if ``waves_fn`` provides it: a
grid that fits one wave at the neighbour may need two here. The extrapolation is a guess, so the
candidates are chosen to differ in tile shape.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from triton_dist._tuning.sizes.size_table import SizeTimes, size_times
from triton_dist._tuning.values import Config, Key, Measurement, Trial, TuningRecord
from triton_dist._tuning.values.sizes import Family, Sizes, distance
from triton_dist.errors import InvalidArgument

MAX_DISTANCE = 1.0
"""Maximum distance of neighbours, in doublings of a size."""
HOOK_NAMES = "fallback_fn or waves_fn"
"""Names, for messages, of the user functions that receive neighbours' configs."""
_MAX_CANDIDATES, _MAX_CANDIDATES_WITH_WAVES = 6, 4
"""Maximum number of neighbours' configs that race: without and with known waves."""
_SAME_WAVES_PENALTY = 0.03
"""Penalty on a candidate's relative time for each already chosen candidate with the same number of
waves."""
_MAX_FALLBACKS = 4
"""Maximum number of fallback kinds that race in addition."""
_MIN_NEIGHBOURS, _MIN_FULLY_TUNED = 6, 3
"""Number of nearest neighbours that are used, and how many of them must be fully tuned."""
_MAX_DELAY = 1.0
"""Relative delay at the neighbours above which a config is not a candidate."""
_MAX_UNMEASURED_DELAY = 0.1
"""Relative delay above which a config is not used without a measurement."""
_MAX_ONE_SIDED_DISTANCE = 0.3
"""If the only neighbour is further away (in doublings), use a fallback config, not its winner."""

_ROUNDS = 8
"""Iterations of :func:`aligned_means`."""


def slowdowns(record: TuningRecord) -> dict[str, float]:
    """Return, by digest, the log of the ratio of each config's median to the winner's."""
    medians = {
        trial.digest: trial.outcome.median
        for trial in record.trials
        if isinstance(trial.outcome, Measurement) and trial.outcome.median > 0
    }
    best = medians.get(record.best.digest) or min(medians.values(), default=1.0)
    return {digest: math.log(median / best) for digest, median in medians.items()}


def aligned_means(
    delays: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """Return, by name, the weighted mean of several lists of delays.

    The delays of a list are relative to its own fastest entry, so lists have different zeros. Least
    squares finds the offsets. Without offsets, the best entry of a list of slow entries would have
    delay 0.
    """
    scores = means(delays, weights)
    for _ in range(_ROUNDS):
        zeros = (
            sum(scores[name] - delay for name, delay in each.items()) / max(1, len(each))
            for each in delays
        )
        moved = [
            {name: delay + zero for name, delay in each.items()}
            for each, zero in zip(delays, zeros, strict=True)
        ]
        scores = means(moved, weights)
    return scores


def means(lists: Iterable[Mapping[str, float]], weights: Iterable[float]) -> dict[str, float]:
    """Return, by name, the weighted mean over the ``lists`` that contain it."""
    sums: dict[str, tuple[float, float]] = {}
    for values, weight in zip(lists, weights, strict=True):
        for name, value in values.items():
            total, counts = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, counts + weight
    return {name: total / counts for name, (total, counts) in sums.items()}


@dataclass(frozen=True)
class Neighbour:
    """Valid record of a key with similar sizes."""

    sizes: tuple[int, ...]
    distance: float
    record: TuningRecord
    slowdowns: Mapping[str, float]
    """By digest, the log of the ratio of the median to the fastest median of the record."""

    @property
    def weight(self) -> float:
        """Weight in means over neighbours; decreases with the distance."""
        return 1 / (self.distance + 0.1)


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of a key, nearest first."""

    family: Family
    all: Sequence[Neighbour]
    fallback_fn: Callable[[Config], object]
    waves: Callable[[Config, Sequence[int]], float | None] = lambda config, sizes: None
    """Return the number of waves of a config at some sizes, or ``None`` if unknown."""

    def tried_all_kinds(self, kept: Sequence[Config]) -> bool:
        """Return whether fully tuned neighbours have tried every kind of config in ``kept``.

        If a kind, such as an algorithm for small sizes, was not tried, a warm start would never
        find it, and each warm start would cover less of the space than the previous one. Shipped
        records contain only the best configs and count as having tried all.
        """
        fully_tuned = [each.record for each in self.all if not each.record.warm_started_from]
        if any(record.shipped for record in fully_tuned):
            return True
        trials = (trial for record in fully_tuned for trial in record.trials)
        tried = {each.digest for each in trials if getattr(each.outcome, "kind", "") != "pruned"}
        kinds = {_kind(config) for config in kept if config.digest in tried}
        return all(_kind(config) in kinds or self.fallback_fn(config) for config in kept)

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        fallback_fn: Callable[[Config], object],
        key: Key,
        user_key: object,
        records: Iterable[TuningRecord],
        is_valid: Callable[[TuningRecord], bool],
    ) -> Neighbours:
        """Return the neighbours of ``key`` among ``records``.

        ``user_key`` is the value that ``key_fn`` returned; ``key`` contains its text. ``is_valid``
        decides whether a record may be used for this call.
        """
        family = sizes.family(user_key)
        relatives: list[tuple[float, tuple[int, ...], TuningRecord]] = []
        for record in records:
            at = family.sizes_of(record.key) if record.key.hardware == key.hardware else None
            if at not in (None, family.sizes) and family.rounds_to(at, record.measured_sizes):
                doublings = distance(at, family.sizes)
                relatives += [(doublings, at, record)] if doublings <= MAX_DISTANCE else []
        waves = functools.partial(sizes.waves, user_key)
        return cls(family, nearest(relatives, is_valid), fallback_fn, waves)

    def __str__(self) -> str:
        return "; ".join(self.family.show(each.sizes) for each in self.all[:2])

    def candidates(self, kept: Sequence[Config], milliseconds: float = 30.0) -> list[Config]:
        """Return the configs of ``kept`` that are near the best at the neighbours, best first.

        They alternate with the fastest fallback config of each kind. More time allows more configs.
        """
        waves = {config: self.waves(config, self.family.sizes) for config in kept}
        has_waves = any(each is not None for each in waves.values())
        # Mean delay over the neighbours that measured a config, weighted by distance. With known
        # waves, use only fully tuned neighbours: a warm-started neighbour measured few configs.
        sources = [each for each in self.all if not (has_waves and each.record.warm_started_from)]
        delays = [self._delays(each, kept) for each in sources]
        scores = means(delays, [each.weight for each in sources])
        known = sorted(
            (config for config in kept if config.digest in scores),
            key=lambda config: scores[config.digest],
        )
        near = [c for c in known if scores[c.digest] <= math.log1p(_MAX_DELAY)]
        share = math.sqrt(max(1.0, milliseconds / 30))
        number = round(share * (_MAX_CANDIDATES_WITH_WAVES if has_waves else _MAX_CANDIDATES))
        near = _with_different_waves(near, scores, waves, number)
        if not near:
            return []
        fallback = self.fallback(kept)
        # Interleaved, because time may end the race.
        pairs = itertools.zip_longest(near, fallback[:_MAX_FALLBACKS])
        return list(dict.fromkeys(each for pair in pairs for each in pair if each is not None))

    def fallback(self, kept: Sequence[Config]) -> list[Config]:
        """Return the fastest fallback config of each kind, fastest kind first.

        Their order changes little with size, so warm-started neighbours are used too.
        """
        fallback = [config for config in kept if self.fallback_fn(config)]
        delays = [self._delays(each, fallback) for each in self.all]
        scores = aligned_means(delays, [each.weight for each in self.all])
        kinds: dict[object, Config] = {}
        for config in sorted(fallback, key=lambda config: scores.get(config.digest, math.inf)):
            kind = self.fallback_fn(config)
            try:
                kinds.setdefault(kind, config)
            except TypeError as error:
                expected, what = "True, False or a name", "the result of fallback_fn"
                raise InvalidArgument("autotune", what, kind, expected) from error
        return list(kinds.values())

    def times(
        self, record: TuningRecord, usable: Sequence[Config], others: Sequence[Neighbour]
    ) -> SizeTimes:
        """Return the latency curves of ``usable`` configs over the range of ``record``; ``others``
        provide the slopes."""
        (at,) = record.measured_sizes or self.family.sizes
        measured = [((each.record.measured_sizes or each.sizes)[0], each.record) for each in others]
        is_fallback = {config.digest: bool(self.fallback_fn(config)) for config in usable}
        return size_times(record, at, measured, is_fallback)

    def predict(self, key: Key, kept: Sequence[Config], now: str) -> TuningRecord | None:
        """Return the record, with timestamp ``now``, to use for ``key`` if nothing can be measured.

        The config is the one with the smallest delay at the neighbours on both sides; in doubt, a
        fallback config. Return ``None`` without a candidate that a neighbour measured.
        """
        candidates = self.candidates(kept)
        if not candidates:
            return None
        above = [each for each in self.all if each.sizes > self.family.sizes]
        below = [each for each in self.all if each.sizes < self.family.sizes]
        nearest = [*below[:1], *above[:1]]
        delays = [self._delays(each, kept) for each in nearest]
        worst = {
            config: max(each.get(config.digest, math.inf) for each in delays)
            for config in candidates
        }
        chosen = min(candidates, key=lambda config: worst[config])
        one_sided = len(nearest) == 1 and nearest[0].distance > _MAX_ONE_SIDED_DISTANCE
        if one_sided or worst[chosen] > math.log1p(_MAX_UNMEASURED_DELAY):
            chosen = next(filter(self.fallback_fn, candidates), chosen)
        source = next((each for each in self.all if chosen.digest in each.slowdowns), None)
        if source is None:
            return None
        trial = next(each for each in source.record.trials if each.digest == chosen.digest)
        assert isinstance(trial.outcome, Measurement)
        milliseconds = trial.outcome.median * math.exp(self._growth(chosen, source))
        outcome = Measurement((round(milliseconds, 6),), 0, trial.outcome.reduction)
        return dataclasses.replace(
            source.record,
            key=key,
            trials=(Trial(trial.digest, trial.config, outcome),),
            timestamp=now,
            seconds=0.0,
            warm_started_from=f"predicted from {self}",
            measured_sizes=(),
        )

    def _delays(self, neighbour: Neighbour, kept: Sequence[Config]) -> dict[str, float]:
        """Return, by digest, delays of ``kept`` extrapolated from a neighbour to this key's sizes.

        They are relative to the config of ``kept`` that was fastest at the neighbour.
        """
        known = [config for config in kept if config.digest in neighbour.slowdowns]
        if not known:
            return {}
        fastest = min(known, key=lambda config: neighbour.slowdowns[config.digest])
        own = self._growth(fastest, neighbour)
        return {
            config.digest: neighbour.slowdowns[config.digest]
            + self._growth(config, neighbour)
            - own
            for config in known
        }

    def _growth(self, config: Config, neighbour: Neighbour) -> float:
        """Return the log of the expected ratio of the time here to the time at the neighbour, from
        the number of waves if known, else from the sizes."""
        measured, ours = neighbour.record.measured_sizes or neighbour.sizes, self.family.sizes
        waves, others = self.waves(config, ours), self.waves(config, measured)
        if waves is None or others is None:
            return sum(math.log(max(a, 1) / max(b, 1)) for a, b in zip(ours, measured, strict=True))
        return math.log(max(math.ceil(waves), 1) / max(math.ceil(others), 1))


def nearest(
    relatives: Iterable[tuple[float, tuple[int, ...], TuningRecord]],
    is_valid: Callable[[TuningRecord], bool] = lambda record: True,
) -> list[Neighbour]:
    """Return the nearest six of ``relatives`` (distance, sizes, record), or more until three of
    them are fully tuned."""
    found: dict[tuple[int, ...], Neighbour] = {}
    num_fully_tuned = 0
    for doublings, sizes, record in sorted(relatives, key=lambda each: each[:2]):
        if sizes in found or (len(found) >= _MIN_NEIGHBOURS and record.warm_started_from):
            continue
        if is_valid(record):
            found[sizes] = Neighbour(sizes, doublings, record, slowdowns(record))
            num_fully_tuned += not record.warm_started_from
        if num_fully_tuned >= _MIN_FULLY_TUNED and len(found) >= _MIN_NEIGHBOURS:
            break
    return list(found.values())


def _with_different_waves(
    near: Sequence[Config],
    scores: Mapping[str, float],
    waves: Mapping[Config, float | None],
    number: int,
) -> list[Config]:
    """Return the ``number`` best of ``near``, with a penalty for each chosen config with the same
    number of waves: their times are correlated."""
    chosen_by_waves: Counter[float | None] = Counter()
    chosen: list[Config] = []
    left = list(near)
    while left and len(chosen) < number:
        best = min(
            left, key=lambda c: scores[c.digest] + _SAME_WAVES_PENALTY * chosen_by_waves[waves[c]]
        )
        left.remove(best)
        chosen.append(best)
        if waves[best] is not None:
            chosen_by_waves[waves[best]] += 1
    return chosen


def _kind(config: Config) -> frozenset[tuple[str, str | None]]:
    """Return the parameter names of a config and its string values, such as the algorithm."""
    return frozenset((k, v if isinstance(v, str) else None) for k, v in config.items())
