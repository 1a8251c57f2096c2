"""Analyse a record of a tuning, and compare two records.

The analysis shows which parameters matter and how much slower each value is. It uses the median
time of each config. A config that was eliminated early has few samples, so its median is imprecise:
a lower median than the winner's does not mean that the config is faster.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from triton_dist._tuning.values.codec import Tree
from triton_dist._tuning.values.outcome import Failure, Measurement
from triton_dist._tuning.values.record import Trial, TuningRecord
from triton_dist._tuning.values.show import show

ABSENT = "-"
"""Text instead of the value of a parameter that a config does not have."""


class MeasuredTrial(NamedTuple):
    """A trial that did not fail."""

    trial: Trial
    parameters: Mapping[str, str]
    """Values as Python source, by parameter name."""
    ms: float
    """Median of the samples in milliseconds."""
    samples: tuple[float, ...]


@dataclass(frozen=True)
class FailureGroup:
    """The trials with one kind of failure."""

    kind: str
    count: int
    first: str
    """Message of the first failure."""


@dataclass(frozen=True)
class Analysis:
    """Statistics of one record."""

    record: TuningRecord

    @cached_property
    def timed(self) -> tuple[MeasuredTrial, ...]:
        """Measured trials, fastest first."""
        found = [
            MeasuredTrial(
                trial, parameters(trial.config), trial.outcome.median, trial.outcome.samples
            )
            for trial in self.record.trials
            if isinstance(trial.outcome, Measurement)
        ]
        return tuple(sorted(found, key=lambda each: each.ms))

    @cached_property
    def winner(self) -> MeasuredTrial:
        """The winning trial of the record. Another trial may have a lower median."""
        best = self.record.best.digest
        return next(each for each in self.timed if each.trial.digest == best)

    @cached_property
    def pruned(self) -> tuple[tuple[str, str], ...]:
        """Text of each pruned config, and the reason."""
        outcomes = ((trial, trial.outcome) for trial in self.record.trials)
        return tuple(
            (str(trial), each.message)
            for trial, each in outcomes
            if isinstance(each, Failure) and each.kind == "pruned"
        )

    @cached_property
    def failed(self) -> tuple[FailureGroup, ...]:
        """Failures by kind, most frequent first, without pruned configs."""
        kinds: dict[str, list[str]] = {}
        for trial in self.record.trials:
            if isinstance(trial.outcome, Failure) and trial.outcome.kind != "pruned":
                kinds.setdefault(trial.outcome.kind, []).append(trial.outcome.message)
        found = (FailureGroup(kind, len(texts), texts[0]) for kind, texts in kinds.items())
        return tuple(sorted(found, key=lambda each: -each.count))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Names of the parameters with several values among the measured configs."""
        return tuple(name for name in self._names if len(self.values(name)) > 1)

    @property
    def fixed(self) -> dict[str, str]:
        """The value of each parameter that does not vary, by name."""
        return {name: self.values(name)[0] for name in self._names if name not in self.varying}

    def values(self, name: str) -> list[str]:
        """Return the sorted values of a parameter among the measured configs."""
        return sorted({each.parameters.get(name, ABSENT) for each in self.timed}, key=_sort_key)

    def ratio(self, ms: float) -> float:
        """Return ``ms`` divided by the median of the winner."""
        return ms / max(self.winner.ms, _MIN_MS)

    def count_within(self, share: float) -> int:
        """Return the number of configs that are slower than the winner by at most the fraction
        ``share``, the winner included."""
        return sum(self.ratio(each.ms) <= 1 + share for each in self.timed)

    def parameters_by_importance(self) -> list[tuple[str, float]]:
        """Return name and importance of the varying parameters, most important first.

        The importance is PED-ANOVA's: how much the distribution of the parameter's values among
        the fastest configs differs from that among all measured configs, as Pearson divergence
        (Watanabe et al., IJCAI 2023). The divergence expected of random configs is subtracted.
        The importances add up to one, or are all zero.
        """
        total = len(self.timed)
        fastest = self.timed[: max(1, math.ceil(total / 10), min(_MIN_NUM_FASTEST, total // 2))]
        importance = {}
        for name in self.varying:
            every, best = (
                Counter(each.parameters.get(name, ABSENT) for each in among)
                for among in (self.timed, fastest)
            )
            divergence = sum(
                n / total * (best[value] / len(fastest) * total / n - 1) ** 2
                for value, n in every.items()
            )
            expected_by_chance = (
                (len(every) - 1) / len(fastest) * (total - len(fastest)) / (total - 1)
            )
            importance[name] = max(0.0, divergence - expected_by_chance)
        total_importance = sum(importance.values()) or 1.0
        return sorted(
            ((name, each / total_importance) for name, each in importance.items()),
            key=lambda each: -each[1],
        )

    def slowdown_by_value(self, name: str) -> dict[str, float]:
        """Return, by value of the parameter, how much slower than the winner the fastest config
        with this value is. 0.1 means 10 % slower."""
        return {value: self.ratio(min(times)) - 1 for value, times in self._groups(name).items()}

    def always_failed(self) -> list[tuple[str, str, int]]:
        """Return parameter, value and number of failures, for each value that always failed."""
        failures: dict[tuple[str, str], int] = {}
        for trial in self.record.trials:
            if isinstance(trial.outcome, Failure) and trial.outcome.kind != "pruned":
                for pair in parameters(trial.config).items():
                    failures[pair] = failures.get(pair, 0) + 1
        succeeded = {pair for each in self.timed for pair in each.parameters.items()}
        return [(name, value, count) for (name, value), count in failures.items()
                if (name, value) not in succeeded]  # fmt: skip

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
    def changed_dependencies(self) -> list[str]:
        """One sentence for each difference of keys and fingerprints."""
        old, new = self.before.record, self.after.record
        key = [] if old.key.text == new.key.text else [f"key: it was {old.key}, is {new.key}"]
        return key + old.fingerprint.diff(new.fingerprint)

    @cached_property
    def common(self) -> tuple[tuple[MeasuredTrial, MeasuredTrial], ...]:
        """The older and the newer trial of each config that both records measured."""
        older = {each.trial.digest: each for each in self.before.timed}
        return tuple(
            (older[new.trial.digest], new) for new in self.after.timed if new.trial.digest in older
        )

    @property
    def only_before(self) -> list[Trial]:
        """Configs that only the older record tried."""
        return _only_in_first(self.before.record, self.after.record)

    @property
    def only_after(self) -> list[Trial]:
        """Configs that only the newer record tried."""
        return _only_in_first(self.after.record, self.before.record)

    @property
    def has_same_winner(self) -> bool:
        return self.before.winner.trial.digest == self.after.winner.trial.digest

    @property
    def ratio(self) -> float:
        """Time of the newer winner divided by the time of the older winner."""
        return self.before.ratio(self.after.winner.ms)

    @property
    def older_winner_ratio(self) -> float | None:
        """Time of the older winner in the newer record, divided by the time of the newer winner;
        ``None`` if the newer record did not measure it."""
        return slowdown_of_winner(self.before, self.after)

    @property
    def correlation(self) -> float | None:
        """Rank correlation of the medians of the common configs: 1 if both records order them
        equally.

        ``None`` for fewer than three common configs, or if all their medians in a record are equal.
        """
        if len(self.common) < 3:
            return None
        ranks = [_ranks([pair[side].ms for pair in self.common]) for side in (0, 1)]
        if any(len(set(each)) == 1 for each in ranks):
            return None
        return statistics.correlation(*ranks)


def slowdown_of_winner(one: Analysis, other: Analysis) -> float | None:
    """Return the time in ``other`` of the winner of ``one``, divided by the time of its own winner.

    ``None`` if ``other`` did not measure the winner of ``one``.
    """
    digest = one.winner.trial.digest
    return next((other.ratio(each.ms) for each in other.timed if each.trial.digest == digest), None)


def parameters(config: Tree) -> dict[str, str]:
    """Return the values of a config as Python source, by name.

    A ``triton.Config`` is replaced by its meta-parameters and options. If one of these names is
    taken, it is written as ``argument.name``, with the name of the argument that has the
    ``triton.Config``.
    """
    by_name: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and "triton.Config" in value:
            options = {key: each for key, each in value.items() if key != "triton.Config"}
            inside = [*value["triton.Config"].items(), *options.items()]
        else:
            inside = [(name, value)]
        for inner, each in inside:
            by_name[f"{name}.{inner}" if inner in by_name else inner] = show(each)
    return by_name


def show_parameters(values: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the parameters ``names`` of a config as text, such as ``BLOCK=64 num_warps=4``."""
    return " ".join(f"{name}={values[name]}" for name in names if name in values)


_MIN_NUM_FASTEST = 8
"""A tenth of all configs counts as fastest, but at least this number, or half of all if less."""
_MIN_MS = 1e-9
"""Milliseconds used instead of a time that is not positive because a clock was set back."""


def _sort_key(value: str) -> tuple[int, float, str]:
    """Return a sort key: numbers first, in numeric order, then other values by text."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value. The rank of equal values is the mean of their ranks."""
    ranks: dict[float, list[int]] = {}
    for rank, value in enumerate(sorted(values)):
        ranks.setdefault(value, []).append(rank)
    return [statistics.fmean(ranks[value]) for value in values]


def _only_in_first(one: TuningRecord, other: TuningRecord) -> list[Trial]:
    in_other = {trial.digest for trial in other.trials}
    return [trial for trial in one.trials if trial.digest not in in_other]
