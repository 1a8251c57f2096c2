"""Answers that a record gives about its space: what matters, what a choice costs, what changed.

Everything is of the medians that were measured. A candidate that left early has few samples, so its
median is rough: good enough for a picture of the space, not for choosing another winner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triton_dist._tuning.values.codec import Tree
from triton_dist._tuning.values.outcome import Failure, Measurement
from triton_dist._tuning.values.record import Trial, TuningRecord
from triton_dist._tuning.values.show import show

ABSENT = "-"
"""Shown for a parameter that a config does not have."""


class Timed(NamedTuple):
    """A trial that was measured."""

    trial: Trial
    parameters: Mapping[str, str]
    ms: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class Failed:
    """The failures of one kind."""

    kind: str
    count: int
    first: str
    """Message of the first of them."""


@dataclass(frozen=True)
class Analysis:
    """Answers about one record."""

    record: TuningRecord

    @cached_property
    def timed(self) -> tuple[Timed, ...]:
        """All that was measured, the fastest first."""
        found = [
            Timed(trial, parameters(trial.config), trial.outcome.median, trial.outcome.samples)
            for trial in self.record.trials
            if isinstance(trial.outcome, Measurement)
        ]
        return tuple(sorted(found, key=lambda each: each.ms))

    @cached_property
    def winner(self) -> Timed:
        """The record's best, which is not always the one with the lowest median."""
        best = self.record.best.digest
        return next(each for each in self.timed if each.trial.digest == best)

    @cached_property
    def pruned(self) -> tuple[tuple[str, str], ...]:
        """Configs that were not tried, each with the reason."""
        outcomes = ((trial, trial.outcome) for trial in self.record.trials)
        return tuple(
            (str(trial), each.message)
            for trial, each in outcomes
            if isinstance(each, Failure) and each.kind == "pruned"
        )

    @cached_property
    def failed(self) -> tuple[Failed, ...]:
        """Failures of configs that were tried, by kind, the most frequent first."""
        kinds: dict[str, list[str]] = {}
        for trial in self.record.trials:
            if isinstance(trial.outcome, Failure) and trial.outcome.kind != "pruned":
                kinds.setdefault(trial.outcome.kind, []).append(trial.outcome.message)
        found = (Failed(kind, len(texts), texts[0]) for kind, texts in kinds.items())
        return tuple(sorted(found, key=lambda each: -each.count))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Parameters that have several values among what was measured."""
        return tuple(name for name in self._names if len(self.values(name)) > 1)

    @property
    def fixed(self) -> dict[str, str]:
        """The other parameters, with their one value."""
        return {name: self.values(name)[0] for name in self._names if name not in self.varying}

    def values(self, name: str) -> list[str]:
        """Values that a parameter has among what was measured, in their order."""
        return sorted({each.parameters.get(name, ABSENT) for each in self.timed}, key=_order)

    def ratio(self, ms: float) -> float:
        """``ms`` over the median of the winner."""
        return ms / max(self.winner.ms, _LEAST)

    def within(self, share: float) -> int:
        """Number of configs at most that share slower than the winner: a flat space has many."""
        return sum(self.ratio(each.ms) <= 1 + share for each in self.timed)

    def importance(self, name: str) -> float:
        """Share of the variance of log time that a parameter explains alone, less what chance does.

        The shares do not add up to one: what is left is how parameters work together.
        """
        groups = self._groups(name)
        logs = [math.log(max(ms, _LEAST)) for times in groups.values() for ms in times]
        total = statistics.pvariance(logs) if logs else 0.0
        if total <= 0:
            return 0.0
        mean = statistics.fmean(logs)
        between = sum(
            len(times) * (statistics.fmean(math.log(max(ms, _LEAST)) for ms in times) - mean) ** 2
            for times in groups.values()
        )
        by_chance = (len(groups) - 1) / len(logs)
        return max(0.0, between / len(logs) / total - by_chance)

    def ranked(self) -> list[tuple[str, float]]:
        """Varying parameters with their importance, the most important first."""
        found = [(name, self.importance(name)) for name in self.varying]
        return sorted(found, key=lambda each: -each[1])

    def price(self, name: str) -> dict[str, float]:
        """Loss from fixing a parameter at each of its values and choosing the others well: time of
        the fastest config that has the value over that of the winner, less one."""
        return {value: self.ratio(min(times)) - 1 for value, times in self._groups(name).items()}

    def always_failed(self) -> list[tuple[str, str, int]]:
        """Values with which nothing could be measured: parameter, value, number of failures."""
        tried: dict[tuple[str, str], int] = {}
        for trial in self.record.trials:
            if isinstance(trial.outcome, Failure) and trial.outcome.kind != "pruned":
                for pair in parameters(trial.config).items():
                    tried[pair] = tried.get(pair, 0) + 1
        well = {pair for each in self.timed for pair in each.parameters.items()}
        return [(name, value, count) for (name, value), count in tried.items()
                if (name, value) not in well]  # fmt: skip

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for each in self.timed for name in each.parameters))

    def _groups(self, name: str) -> dict[str, list[float]]:
        groups: dict[str, list[float]] = {value: [] for value in self.values(name)}
        for each in self.timed:
            groups[each.parameters.get(name, ABSENT)].append(each.ms)
        return groups


@dataclass(frozen=True)
class Changes:
    """Differences between two records of one function."""

    before: Analysis
    after: Analysis

    @classmethod
    def of(cls, before: TuningRecord, after: TuningRecord) -> Changes:
        return cls(Analysis(before), Analysis(after))

    @property
    def facts(self) -> list[str]:
        """A sentence for each thing that the results depend on and that changed."""
        old, new = self.before.record, self.after.record
        key = [] if old.key.text == new.key.text else [f"key: it was {old.key}, is {new.key}"]
        return key + old.fingerprint.diff(new.fingerprint)

    @cached_property
    def common(self) -> tuple[tuple[Timed, Timed], ...]:
        """Configs that both measured."""
        then = {each.trial.digest: each for each in self.before.timed}
        return tuple(
            (then[now.trial.digest], now) for now in self.after.timed if now.trial.digest in then
        )

    @property
    def gone(self) -> list[Trial]:
        """Configs that only the older one tried."""
        return _others(self.before.record, self.after.record)

    @property
    def new(self) -> list[Trial]:
        """Configs that only the newer one tried."""
        return _others(self.after.record, self.before.record)

    @property
    def same_winner(self) -> bool:
        return self.before.winner.trial.digest == self.after.winner.trial.digest

    @property
    def ratio(self) -> float:
        """Time of the newer winner over that of the older."""
        return self.before.ratio(self.after.winner.ms)

    @property
    def older_winner_now(self) -> float | None:
        """Time of the older winner in the newer record over that of its winner."""
        return elsewhere(self.before, self.after)

    @property
    def correlation(self) -> float | None:
        """Rank correlation of the common configs' medians: 1 if their order is the same; ``None``
        for fewer than three."""
        if len(self.common) < 3:
            return None
        ranks = [_ranks([pair[side].ms for pair in self.common]) for side in (0, 1)]
        if any(len(set(each)) == 1 for each in ranks):
            return None
        return statistics.correlation(*ranks)


def elsewhere(of: Analysis, at: Analysis) -> float | None:
    """Time of the winner of one record in another, over that of the other's winner; ``None`` if it
    was not measured there."""
    digest = of.winner.trial.digest
    return next((at.ratio(each.ms) for each in at.timed if each.trial.digest == digest), None)


def parameters(config: Tree) -> dict[str, str]:
    """The names and values of a config as they would be typed; those in a ``triton.Config`` stand
    for it. Where a name comes twice the later has its argument's before it."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and "triton.Config" in value:
            options = {key: each for key, each in value.items() if key != "triton.Config"}
            inside = [*value["triton.Config"].items(), *options.items()]
        else:
            inside = [(name, value)]
        for inner, each in inside:
            found[f"{name}.{inner}" if inner in found else inner] = show(each)
    return found


def shown(values: Mapping[str, str], names: Iterable[str]) -> str:
    """``BLOCK=64 num_warps=4``: some of the parameters of a config."""
    return " ".join(f"{name}={values[name]}" for name in names if name in values)


_LEAST = 1e-9
"""Milliseconds that are taken for a time that is none, after a clock was set back."""


def _order(value: str) -> tuple[int, float, str]:
    """Numbers in their order, then all else by its text."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _ranks(values: Sequence[float]) -> list[float]:
    """The place of each among the values; equal ones share the mean of theirs."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def _others(one: TuningRecord, other: TuningRecord) -> list[Trial]:
    known = {trial.digest for trial in other.trials}
    return [trial for trial in one.trials if trial.digest not in known]
