"""Predict good configs for a new key from the records of keys that differ only in sizes.

Such a key with similar sizes is a *neighbour*. If a new key has neighbours, its first call races a
few configs that are near the best at the neighbours. This takes some milliseconds, while a race of
all candidates takes seconds. If nothing can be measured (frozen mode, graph capture), the config is
chosen from the records of the neighbours alone.

If ``waves_fn`` provides the number of waves of a config, it scales the times measured at a
neighbour: a grid that fits one wave at the neighbour's size may need two waves at the new size. The
scaled times are imprecise, so the candidates are chosen to differ in their number of waves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from triton_dist._tuning.sizes.size_table import LatencyCurves, build_latency_curves
from triton_dist._tuning.values import Config, Key, Measurement, Trial, TuningRecord
from triton_dist._tuning.values.sizes import KeyFamily, Sizes, distance
from triton_dist.errors import InvalidArgument

MAX_DISTANCE = 1.0
"""Maximum distance of neighbours, in doublings of a size."""
SIZE_HOOK_NAMES = "fallback_fn or waves_fn"
"""Names, for messages, of the user's functions that are called with configs of neighbours."""
_MAX_CANDIDATES, _MAX_CANDIDATES_WITH_WAVES = 6, 4
"""Maximum number of configs near the best that race: if waves are not known, and if they are."""
_SAME_WAVES_PENALTY = 0.03
"""Added to a candidate's log time for each chosen candidate with the same number of waves."""
_MAX_FALLBACKS = 4
"""Maximum number of fallback configs that race in addition."""
_MIN_NEIGHBOURS, _MIN_FULLY_TUNED = 6, 3
"""The six nearest neighbours are used. If fewer than three of them are fully tuned, further fully
tuned neighbours are used too. *Fully tuned* means: not tuned from neighbours."""
_MAX_DELAY = 1.0
"""A config is a candidate if its expected delay relative to the fastest is at most this number."""
_MAX_UNMEASURED_DELAY = 0.1
"""Without a measurement, a config is used if its expected relative delay is at most this number."""
_MAX_ONE_SIDED_DISTANCE = 0.3
"""If there are neighbours on one side only and the nearest is further away (in doublings), a
fallback config is used."""

_NUM_ITERATIONS = 8  # of the alternating estimate in ``aligned_means``


def log_slowdowns(record: TuningRecord) -> dict[str, float]:
    """Return, by digest, the log of the ratio of the config's median to the winner's median."""
    medians = {
        trial.digest: trial.outcome.median
        for trial in record.trials
        if isinstance(trial.outcome, Measurement) and trial.outcome.median > 0
    }
    best = medians.get(record.best.digest) or min(medians.values(), default=1.0)
    return {digest: math.log(median / best) for digest, median in medians.items()}


def aligned_means(
    log_delays: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """Return, by name, the weighted mean of several maps from name to delay.

    The delays of a map are relative to its fastest entry. An offset is added to each map, by least
    squares: the best entry of a map with slow entries only would otherwise have delay 0.
    """
    scores = weighted_means(log_delays, weights)
    for _ in range(_NUM_ITERATIONS):
        offsets = (
            sum(scores[name] - delay for name, delay in each.items()) / max(1, len(each))
            for each in log_delays
        )
        aligned = [
            {name: delay + offset for name, delay in each.items()}
            for each, offset in zip(log_delays, offsets, strict=True)
        ]
        scores = weighted_means(aligned, weights)
    return scores


def weighted_means(
    maps: Iterable[Mapping[str, float]], weights: Iterable[float]
) -> dict[str, float]:
    """Return, by name, the weighted mean over those ``maps`` that have the name."""
    sums: dict[str, tuple[float, float]] = {}
    for values, weight in zip(maps, weights, strict=True):
        for name, value in values.items():
            total, total_weight = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, total_weight + weight
    return {name: total / total_weight for name, (total, total_weight) in sums.items()}


@dataclass(frozen=True)
class Neighbour:
    """Valid record of a key with similar sizes."""

    sizes: tuple[int, ...]
    """Sizes in the key of the record."""
    distance: float
    """Doublings between these sizes and the sizes of the new key."""
    record: TuningRecord
    log_slowdowns: Mapping[str, float]
    """By digest, the log of the ratio of the config's median to the winner's median."""

    @property
    def weight(self) -> float:
        """Weight in means over neighbours. It decreases with the distance."""
        return 1 / (self.distance + 0.1)


@dataclass(frozen=True)
class Neighbours:
    """Neighbours of a new key, for which ``prune_fn`` keeps the configs ``kept``.

    The *kind* of a config is given by its parameter names and string values, such as the algorithm.
    The *kind* of a fallback config is the result of ``fallback_fn``.
    """

    family: KeyFamily
    neighbours: Sequence[Neighbour]
    """Nearest first."""
    fallback_fn: Callable[[Config], object]
    """Returns a true value for a config that is good at all sizes, such as a library."""
    waves: Callable[[Config, Sequence[int]], float | None] = lambda config, sizes: None
    """Returns the number of waves of a config at given sizes, or ``None`` if it is not known."""

    def tried_all_kinds(self, kept: Sequence[Config]) -> bool:
        """Return whether fully tuned neighbours have tried each kind of config in ``kept``.

        Otherwise a kind, such as an algorithm for small sizes, would never be found. Shipped
        records contain only the best configs and count as having tried all kinds.
        """
        fully_tuned = [each.record for each in self.neighbours if not each.record.warm_started_from]
        if any(record.is_shipped for record in fully_tuned):
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
        """Return the neighbours of ``key`` among the ``records`` for which ``is_valid`` is true.

        ``user_key`` is the result of ``key_fn``, whose text ``key`` contains.
        """
        family = sizes.family(user_key)
        similar: list[tuple[float, tuple[int, ...], TuningRecord]] = []
        for record in records:
            range_ends = (
                family.sizes_of(record.key) if record.key.hardware == key.hardware else None
            )
            if range_ends not in (None, family.sizes) and family.rounds_to(
                range_ends, record.measured_sizes
            ):
                doublings = distance(range_ends, family.sizes)
                similar += [(doublings, range_ends, record)] if doublings <= MAX_DISTANCE else []
        waves = functools.partial(sizes.waves, user_key)
        return cls(family, nearest_neighbours(similar, is_valid), fallback_fn, waves)

    def __str__(self) -> str:
        return "; ".join(self.family.show(each.sizes) for each in self.neighbours[:2])

    def candidates(self, kept: Sequence[Config], milliseconds: float = 30.0) -> list[Config]:
        """Return the configs of ``kept`` to race, the most promising first.

        Configs that are near the best at the neighbours alternate with the fastest fallback config
        of each kind. The number of configs grows with ``milliseconds``, the time for the race.
        """
        waves = {config: self.waves(config, self.family.sizes) for config in kept}
        has_waves = any(each is not None for each in waves.values())
        # Score of a config: its mean delay over the neighbours that measured it, weighted by
        # distance. If waves are known, only fully tuned neighbours are used: a neighbour that was
        # tuned from other neighbours measured few configs.
        sources = [
            each for each in self.neighbours if not (has_waves and each.record.warm_started_from)
        ]
        log_delays = [self._log_delays(each, kept) for each in sources]
        scores = weighted_means(log_delays, [each.weight for each in sources])
        scored = sorted(
            (config for config in kept if config.digest in scores),
            key=lambda config: scores[config.digest],
        )
        promising = [c for c in scored if scores[c.digest] <= math.log1p(_MAX_DELAY)]
        factor = math.sqrt(max(1.0, milliseconds / 30))
        number = round(factor * (_MAX_CANDIDATES_WITH_WAVES if has_waves else _MAX_CANDIDATES))
        promising = _with_different_waves(promising, scores, waves, number)
        if not promising:
            return []
        fallbacks = self.fallbacks(kept)[:_MAX_FALLBACKS]
        # Interleave, because the race may run out of time before the last configs.
        pairs = itertools.zip_longest(promising, fallbacks)
        return list(dict.fromkeys(each for pair in pairs for each in pair if each is not None))

    def fallbacks(self, kept: Sequence[Config]) -> list[Config]:
        """Return the fastest fallback config of each kind, fastest kind first.

        The order of fallback configs changes little with size. Therefore neighbours that were tuned
        from other neighbours are used too.
        """
        fallbacks = [config for config in kept if self.fallback_fn(config)]
        log_delays = [self._log_delays(each, fallbacks) for each in self.neighbours]
        scores = aligned_means(log_delays, [each.weight for each in self.neighbours])
        kinds: dict[object, Config] = {}
        for config in sorted(fallbacks, key=lambda config: scores.get(config.digest, math.inf)):
            kind = self.fallback_fn(config)
            try:
                kinds.setdefault(kind, config)
            except TypeError as error:
                expected, what = "True, False or a name", "the result of fallback_fn"
                raise InvalidArgument("autotune", what, kind, expected) from error
        return list(kinds.values())

    def latency_curves(
        self, record: TuningRecord, usable: Sequence[Config], others: Sequence[Neighbour]
    ) -> LatencyCurves:
        """Return the latency curves of the ``usable`` configs in the range of ``record``, with
        slopes from ``record`` and ``others``."""
        (measured_size,) = record.measured_sizes or self.family.sizes
        measured = [((each.record.measured_sizes or each.sizes)[0], each.record) for each in others]
        is_fallback = {config.digest: bool(self.fallback_fn(config)) for config in usable}
        return build_latency_curves(record, measured_size, measured, is_fallback)

    def predict(self, key: Key, kept: Sequence[Config], now: str) -> TuningRecord | None:
        """Return the record to use for ``key`` if nothing can be measured.

        Its config is the candidate whose larger delay at the nearest neighbours, one on each side,
        is the smallest. If this delay is too large, it is a fallback config. Its timestamp is
        ``now``. Return ``None`` if no neighbour measured a candidate.
        """
        candidates = self.candidates(kept)
        if not candidates:
            return None
        above = [each for each in self.neighbours if each.sizes > self.family.sizes]
        below = [each for each in self.neighbours if each.sizes < self.family.sizes]
        adjacent = [*below[:1], *above[:1]]
        log_delays = [self._log_delays(each, kept) for each in adjacent]
        worst = {
            config: max(each.get(config.digest, math.inf) for each in log_delays)
            for config in candidates
        }
        chosen = min(candidates, key=lambda config: worst[config])
        is_far = len(adjacent) == 1 and adjacent[0].distance > _MAX_ONE_SIDED_DISTANCE
        if is_far or worst[chosen] > math.log1p(_MAX_UNMEASURED_DELAY):
            chosen = next(filter(self.fallback_fn, candidates), chosen)
        source = next(
            (each for each in self.neighbours if chosen.digest in each.log_slowdowns), None
        )
        if source is None:
            return None
        trial = next(each for each in source.record.trials if each.digest == chosen.digest)
        assert isinstance(trial.outcome, Measurement)
        milliseconds = trial.outcome.median * math.exp(self._log_growth(chosen, source))
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

    def _log_delays(self, neighbour: Neighbour, kept: Sequence[Config]) -> dict[str, float]:
        """Return, by digest, the delay of each config in ``kept`` that ``neighbour`` measured.

        Delays are logs of ratios of times, extrapolated from the neighbour's sizes to the sizes of
        the new key. They are relative to the config that was fastest at the neighbour.
        """
        measured = [config for config in kept if config.digest in neighbour.log_slowdowns]
        if not measured:
            return {}
        fastest = min(measured, key=lambda config: neighbour.log_slowdowns[config.digest])
        fastest_growth = self._log_growth(fastest, neighbour)
        return {
            config.digest: neighbour.log_slowdowns[config.digest]
            + self._log_growth(config, neighbour)
            - fastest_growth
            for config in measured
        }

    def _log_growth(self, config: Config, neighbour: Neighbour) -> float:
        """Return the log of the expected ratio of the time at the new sizes to the time at the
        neighbour's sizes: the ratio of waves or, if waves are not known, of the sizes."""
        old, new = neighbour.record.measured_sizes or neighbour.sizes, self.family.sizes
        new_waves, old_waves = self.waves(config, new), self.waves(config, old)
        if new_waves is None or old_waves is None:
            return sum(math.log(max(a, 1) / max(b, 1)) for a, b in zip(new, old, strict=True))
        return math.log(max(math.ceil(new_waves), 1) / max(math.ceil(old_waves), 1))


def nearest_neighbours(
    similar: Iterable[tuple[float, tuple[int, ...], TuningRecord]],
    is_valid: Callable[[TuningRecord], bool] = lambda record: True,
) -> list[Neighbour]:
    """Return the nearest six valid records, and fully tuned ones until three are fully tuned.

    ``similar`` has distance, sizes and record of each possible neighbour.
    """
    chosen: dict[tuple[int, ...], Neighbour] = {}
    num_fully_tuned = 0
    for doublings, sizes, record in sorted(similar, key=lambda each: each[:2]):
        if sizes in chosen or (len(chosen) >= _MIN_NEIGHBOURS and record.warm_started_from):
            continue
        if is_valid(record):
            chosen[sizes] = Neighbour(sizes, doublings, record, log_slowdowns(record))
            num_fully_tuned += not record.warm_started_from
        if num_fully_tuned >= _MIN_FULLY_TUNED and len(chosen) >= _MIN_NEIGHBOURS:
            break
    return list(chosen.values())


def _with_different_waves(
    promising: Sequence[Config],
    scores: Mapping[str, float],
    waves: Mapping[Config, float | None],
    number: int,
) -> list[Config]:
    """Return ``number`` of the ``promising`` configs with low scores, one after another.

    Each chosen config adds a penalty to configs with equal waves: their times are correlated.
    """
    num_chosen: Counter[float | None] = Counter()  # by waves
    chosen: list[Config] = []
    remaining = list(promising)
    while remaining and len(chosen) < number:
        best = min(
            remaining, key=lambda c: scores[c.digest] + _SAME_WAVES_PENALTY * num_chosen[waves[c]]
        )
        remaining.remove(best)
        chosen.append(best)
        if waves[best] is not None:
            num_chosen[waves[best]] += 1
    return chosen


def _kind(config: Config) -> frozenset[tuple[str, str | None]]:
    """Return the parameter names of a config and its string values, such as the algorithm."""
    return frozenset((k, v if isinstance(v, str) else None) for k, v in config.items())
