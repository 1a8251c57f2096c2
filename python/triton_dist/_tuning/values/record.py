"""The result of one tuning: everything that was tried, and the winner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.config import Config, show_config
from triton_dist._tuning.values.fingerprint import Fingerprint
from triton_dist._tuning.values.key import Key
from triton_dist._tuning.values.outcome import FAILURE_KINDS, Failure, Measurement, Outcome
from triton_dist.errors import NoValidConfig

SCHEMA = 1
"""Raised whenever a reader of the previous one would misread a record."""


@dataclass(frozen=True)
class Trial:
    """One config and what came of it. The config is text here: the live one has the same digest."""

    digest: str
    config: codec.Tree
    outcome: Outcome

    @classmethod
    def of(cls, config: Config, outcome: Outcome) -> Trial:
        return cls(config.digest, config.tree, outcome)

    def __str__(self) -> str:
        return show_config(self.config)


@dataclass(frozen=True)
class TuningRecord:
    """A finished tuning, as it is kept in memory and on disk."""

    key: Key
    fingerprint: Fingerprint
    trials: tuple[Trial, ...]
    timestamp: str
    """When it was finished, UTC, ISO 8601."""
    seconds: float
    """How long it took."""

    @property
    def best(self) -> Trial:
        """The trial with the lowest median; of equals the earliest in the space.

        Raises:
            NoValidConfig: every config failed; holds each cause.
        """
        measured = [trial for trial in self.trials if isinstance(trial.outcome, Measurement)]
        if not measured:
            causes = {str(trial): str(trial.outcome) for trial in self.trials}
            raise NoValidConfig(self.key.function, self.key, causes)
        return min(measured, key=lambda trial: trial.outcome.median)  # type: ignore[union-attr]

    @property
    def digest(self) -> str:
        """Tells this tuning from any other, of the same key too."""
        return codec.digest(self.to_tree())

    def to_tree(self) -> codec.Tree:
        """For a file: in an order in which a person wants to read it."""
        best = self.best
        return {
            "schema": SCHEMA,
            "function": self.key.function,
            "key": json.loads(self.key.text),
            "best": {
                "config": str(best),
                "digest": best.digest,
                "ms": best.outcome.median,  # type: ignore[union-attr]
            },
            "trials": [_trial_tree(trial) for trial in self.trials],
            "timestamp": self.timestamp,
            "seconds": self.seconds,
            "hardware_group": self.key.hardware,
            "fingerprint": {name: _plain(facts) for name, facts in vars(self.fingerprint).items()},
        }

    @classmethod
    def from_tree(cls, tree: codec.Tree) -> TuningRecord:
        """The record that :meth:`to_tree` wrote.

        Raises:
            ValueError: anything else; says what is wrong with it.
        """
        if not isinstance(tree, dict):
            raise ValueError("it is not a JSON object")
        if tree.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {tree.get('schema')!r}, this version reads {SCHEMA}")
        try:
            record = cls(
                key=Key(tree["function"], codec.text(tree["key"]), tree["hardware_group"]),
                fingerprint=_read_fingerprint(tree["fingerprint"]),
                trials=tuple(_read_trial(trial) for trial in tree["trials"]),
                timestamp=str(tree["timestamp"]),
                seconds=float(tree["seconds"]),
            )
            if record.best.digest != tree["best"]["digest"]:
                raise ValueError("its best config is not the fastest of its trials")
        except (KeyError, TypeError, AttributeError, NoValidConfig) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return record


def _plain(facts: Mapping[str, str] | str) -> codec.Tree:
    return facts if isinstance(facts, str) else dict(facts)


def _trial_tree(trial: Trial) -> codec.Tree:
    tree: dict[str, codec.Tree] = {"config": str(trial), "digest": trial.digest}
    if isinstance(trial.outcome, Failure):
        tree["failure"] = dict(vars(trial.outcome))
    else:
        tree["ms"] = trial.outcome.median
        tree |= vars(trial.outcome) | {"samples": list(trial.outcome.samples)}
    return tree | {"values": trial.config}


def _read_trial(tree: Mapping[str, Any]) -> Trial:
    config = tree["values"]
    if codec.digest(config) != tree["digest"]:
        raise ValueError(f"the digest of config {show_config(config)} does not fit")
    return Trial(tree["digest"], config, _read_outcome(tree))


def _read_outcome(tree: Mapping[str, Any]) -> Outcome:
    if "failure" in tree:
        failure = Failure(**tree["failure"])
        if failure.kind not in FAILURE_KINDS:
            raise ValueError(f"no failure is of kind {failure.kind!r}")
        return failure
    samples: Sequence[float] = [float(sample) for sample in tree["samples"]]
    return Measurement(tuple(samples), int(tree["warmup"]), tree["reduction"])


def _read_fingerprint(tree: Mapping[str, Any]) -> Fingerprint:
    fingerprint = Fingerprint(**tree)
    for name, facts in tree.items():
        if not isinstance(facts, str if name == "space" else dict):
            raise ValueError(f"its fingerprint has {name} {facts!r}")
    return fingerprint
