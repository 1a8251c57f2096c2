"""Analyse a record: which parameters matter, what each value costs, what changed between records.

All results are computed from the measured medians. A candidate that was eliminated early has few
samples, so its median is imprecise. It describes the space but cannot select another winner.
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
"""Value shown for a parameter that a config lacks."""


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
    """Message of the first failure."""


@dataclass(frozen=True)
class Analysis:
    """Statistics of one record."""

    record: TuningRecord

    @cached_property
    def timed(self) -> tuple[Timed, ...]:
        """Measured trials, fastest first."""
        found = [
            Timed(trial, parameters(trial.config), trial.outcome.median, trial.outcome.samples)
            for trial in self.record.trials
            if isinstance(trial.outcome, Measurement)
        ]
        return tuple(sorted(found, key=lambda each: each.ms))

    @cached_property
    def winner(self) -> Timed:
        """The winning trial of the record. It may not have the lowest median."""
        best = self.record.best.digest
        return next(each for each in self.timed if each.trial.digest == best)

    @cached_property
    def pruned(self) -> tuple[tuple[str, str], ...]:
        """Pruned configs, each with the reason."""
        outcomes = ((trial, trial.outcome) for trial in self.record.trials)
        return tuple(
            (str(trial), each.message)
            for trial, each in outcomes
            if isinstance(each, Failure) and each.kind == "pruned"
        )

    @cached_property
    def failed(self) -> tuple[Failed, ...]:
        """Failures of configs that were not pruned, by kind, most frequent first."""
        kinds: dict[str, list[str]] = {}
        for trial in self.record.trials:
            if isinstance(trial.outcome, Failure) and trial.outcome.kind != "pruned":
                kinds.setdefault(trial.outcome.kind, []).append(trial.outcome.message)
        found = (Failed(kind, len(texts), texts[0]) for kind, texts in kinds.items())
        return tuple(sorted(found, key=lambda each: -each.count))

    @cached_property
    def varying(self) -> tuple[str, ...]:
        """Parameters with several values among the measured configs."""
        return tuple(name for name in self._names if len(self.values(name)) > 1)

    @property
    def fixed(self) -> dict[str, str]:
        """Parameters that do not vary, with their value."""
        return {name: self.values(name)[0] for name in self._names if name not in self.varying}

    def values(self, name: str) -> list[str]:
        """Return the sorted values of a parameter among the measured configs."""
        return sorted({each.parameters.get(name, ABSENT) for each in self.timed}, key=_order)

    def ratio(self, ms: float) -> float:
        """Return ``ms`` divided by the median of the winner."""
        return ms / max(self.winner.ms, _MIN_MS)

    def count_within(self, share: float) -> int:
        """Return how many configs are at most ``share`` slower than the winner.

        A flat space has many such configs.
        """
        return sum(self.ratio(each.ms) <= 1 + share for each in self.timed)

    def ranked(self) -> list[tuple[str, float]]:
        """Return the varying parameters with their importance by PED-ANOVA, most important first.

        The importance is the Pearson divergence of the parameter's values among the fastest configs
        from its values among all measured configs (Watanabe et al., IJCAI 2023). The divergence
        that random configs would have is subtracted. The results add up to one, or are all zero.
        """
        total = len(self.timed)
        fastest = self.timed[: max(1, math.ceil(total / 10), min(_MIN_NUM_FASTEST, total // 2))]
        found = {}
        for name in self.varying:
            every, best = (
                Counter(each.parameters.get(name, ABSENT) for each in among)
                for among in (self.timed, fastest)
            )
            divergence = sum(
                n / total * (best[value] / len(fastest) * total / n - 1) ** 2
                for value, n in every.items()
            )
            by_chance = (len(every) - 1) / len(fastest) * (total - len(fastest)) / (total - 1)
            found[name] = max(0.0, divergence - by_chance)
        whole = sum(found.values()) or 1.0
        return sorted(
            ((name, each / whole) for name, each in found.items()), key=lambda each: -each[1]
        )

    def slowdown_by_value(self, name: str) -> dict[str, float]:
        """Return the slowdown caused by fixing a parameter at each of its values.

        The slowdown is the time of the fastest config with the value, divided by the time of the
        winner, minus one.
        """
        return {value: self.ratio(min(times)) - 1 for value, times in self._groups(name).items()}

    def always_failed(self) -> list[tuple[str, str, int]]:
        """Return parameter, value and number of failures for values that never succeeded."""
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
        """One sentence for each changed dependency of the results."""
        old, new = self.before.record, self.after.record
        key = [] if old.key.text == new.key.text else [f"key: it was {old.key}, is {new.key}"]
        return key + old.fingerprint.diff(new.fingerprint)

    @cached_property
    def common(self) -> tuple[tuple[Timed, Timed], ...]:
        """Pairs of trials of the configs that both records measured."""
        then = {each.trial.digest: each for each in self.before.timed}
        return tuple(
            (then[now.trial.digest], now) for now in self.after.timed if now.trial.digest in then
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
    def same_winner(self) -> bool:
        return self.before.winner.trial.digest == self.after.winner.trial.digest

    @property
    def ratio(self) -> float:
        """Time of the newer winner divided by the time of the older winner."""
        return self.before.ratio(self.after.winner.ms)

    @property
    def older_winner_now(self) -> float | None:
        """Time of the older winner in the newer record, divided by the time of its winner."""
        return slowdown_of_winner(self.before, self.after)

    @property
    def correlation(self) -> float | None:
        """Rank correlation of the medians of common configs; 1 if their order is equal.

        ``None`` for fewer than three configs, or if all medians of a record are equal.
        """
        if len(self.common) < 3:
            return None
        ranks = [_ranks([pair[side].ms for pair in self.common]) for side in (0, 1)]
        if any(len(set(each)) == 1 for each in ranks):
            return None
        return statistics.correlation(*ranks)


def slowdown_of_winner(of: Analysis, at: Analysis) -> float | None:
    """Return the slowdown of the winner of ``of`` in ``at``, relative to the winner of ``at``.

    ``None`` if ``at`` did not measure that config.
    """
    digest = of.winner.trial.digest
    return next((at.ratio(each.ms) for each in at.timed if each.trial.digest == digest), None)


def parameters(config: Tree) -> dict[str, str]:
    """Return the names and values of a config as Python source.

    A ``triton.Config`` is replaced by its parameters. If a name occurs twice, the second occurrence
    is prefixed with the name of its argument.
    """
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
    """Return some parameters of a config as text, such as ``BLOCK=64 num_warps=4``."""
    return " ".join(f"{name}={values[name]}" for name in names if name in values)


_MIN_NUM_FASTEST = 8
"""The fastest configs are a tenth of all, but at least this number or half of all."""
_MIN_MS = 1e-9
"""Milliseconds used for a time that is not positive because a clock was set back."""


def _order(value: str) -> tuple[int, float, str]:
    """Return a sort key: numbers first, in numeric order, then other values by text."""
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    places: dict[float, list[int]] = {}
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def _only_in_first(one: TuningRecord, other: TuningRecord) -> list[Trial]:
    known = {trial.digest for trial in other.trials}
    return [trial for trial in one.trials if trial.digest not in known]
