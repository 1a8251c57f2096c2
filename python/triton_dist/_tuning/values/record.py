"""Define the record of one tuning, which has all trials and the winner, and check its validity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.config import Config, ConfigSpace, show_config
from triton_dist._tuning.values.fingerprint import (
    Difference,
    Fingerprint,
    OlderFingerprint,
    ShippedFingerprint,
)
from triton_dist._tuning.values.key import Key
from triton_dist._tuning.values.outcome import (
    UNREADABLE,
    Measurement,
    Outcome,
    RankTimes,
    outcome_tree,
    read_number,
    read_outcome,
)
from triton_dist._tuning.values.winner import winner
from triton_dist.errors import NewerSchema, NoValidConfig

SCHEMA = 4
"""Version of the record format. Older records can be read. Increase it if an older reader would
misread a new record. Since 2, the function name does not include the module. Since 3, constants are
recorded apart from the code. Since 4, there is a checksum, and each Python statement of the source
has its own digest."""


_OPTIONAL = ("version", "literal", "bound", "uncounted")
"""Fields of :class:`Fingerprint` that are written only if they are not empty."""


@dataclass(frozen=True)
class Trial:
    """One config and the outcome of trying it."""

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
    """Result of a finished tuning."""

    key: Key
    fingerprint: Fingerprint
    trials: tuple[Trial, ...]
    timestamp: str
    """End of the tuning, UTC, ISO 8601."""
    seconds: float
    warm_started_from: str = ""
    """Names the records at other sizes from which the candidates were chosen, if any."""
    measured_sizes: tuple[int, ...] = ()
    """Sizes of the measured call. Empty if they equal the sizes in the key. A size in the key is
    the largest size of the range for which the result is used."""
    num_pruned_by_reason: Mapping[str, int] = field(default_factory=dict)
    """If the space is too large to list: number of pruned configs, by reason."""
    times_by_rank: Mapping[str, RankTimes] = field(default_factory=dict)
    """Times of each rank, by digest of the config. Only for the configs with the most samples."""

    def __getattr__(self, name: str) -> Any:
        """Parse ``trials`` at first use, if :meth:`from_tree` kept them as JSON text."""
        trials_json = self.__dict__.get("_trials_json")
        if name != "trials" or trials_json is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        trials = tuple(map(_read_trial, codec.loads(trials_json)))
        self.__dict__["trials"] = trials
        return trials

    @cached_property
    def best(self) -> Trial:
        """The winning trial.

        :func:`~triton_dist._tuning.values.winner.winner` selects it with the recorded
        ``Policy.indifference``.

        Raises:
            NoValidConfig: all configs failed. The error has the cause for each config.
        """
        indifference = float(self.fingerprint.policy.get("indifference", 0.0))
        index = winner([trial.outcome for trial in self.trials], indifference)
        if index is None:
            causes = {str(trial): str(trial.outcome) for trial in self.trials}
            causes |= {
                f"{count} configs": reason for reason, count in self.num_pruned_by_reason.items()
            }
            raise NoValidConfig(self.key.full_name, self.key, causes)
        return self.trials[index]

    @property
    def is_shipped(self) -> bool:
        """True if the record was read from a pack (a file of shipped results). It has few trials,
        and fewer dependencies are compared."""
        return isinstance(self.fingerprint, ShippedFingerprint)

    @property
    def digest(self) -> str:
        """Hash of the key, the end time, the duration and the winner with its median.

        It identifies this tuning among all tunings of the key.
        """
        best = self.best
        milliseconds = outcome_tree(best.outcome)["ms"]
        return codec.digest(
            self.key.digest, self.timestamp, self.seconds, best.digest, milliseconds
        )

    def to_tree(self) -> codec.Tree:
        """Return the JSON tree for a file, with the most interesting parts first."""
        best = self.best
        optional = {
            "warm_started_from": self.warm_started_from,
            "at": list(self.measured_sizes),
            "dropped": dict(self.num_pruned_by_reason),
            "by_rank": {digest: times.to_tree() for digest, times in self.times_by_rank.items()},
        }
        return {
            "schema": 3 if isinstance(self.fingerprint, OlderFingerprint) else SCHEMA,
            "function": self.key.function,
            "module": self.key.module,
            "signature": self.key.signature,
            "key": json.loads(self.key.text),
            "best": {
                "config": str(best),
                "digest": best.digest,
                "ms": best.outcome.median,  # type: ignore[union-attr]
            },
            "trials": [
                {
                    "config": str(trial),
                    "digest": trial.digest,
                    **outcome_tree(trial.outcome),
                    "values": trial.config,
                }
                for trial in self.trials
            ],
            "timestamp": self.timestamp,
            "seconds": self.seconds,
            **{name: part for name, part in optional.items() if part},
            "hardware_group": self.key.hardware,
            "fingerprint": {
                name: part if isinstance(part, str) else dict(part)
                for name, part in vars(self.fingerprint).items()
                if name not in _OPTIONAL or part
            },
        }

    @classmethod
    def from_tree(
        cls, tree: codec.Tree, best: codec.Tree = None, trials_json: bytes = b""
    ) -> TuningRecord:
        """Return the record in a tree written by :meth:`to_tree`.

        Args:
            trials_json: JSON text of the trials, if ``tree`` lacks them. It is parsed at first use
                of ``trials``. The caller has verified its checksum.
            best: tree of the winning trial; required with ``trials_json``.

        Raises:
            NewerSchema: a later version of triton_dist wrote the tree, so it may be undamaged.
            ValueError: the tree is malformed. The message has the reason.
        """
        tree, record = _upgraded(tree), object.__new__(cls)
        try:
            parts = _from_tree_without_trials(tree)
            if trials_json:
                parts |= {"best": _read_trial(best), "_trials_json": trials_json}
            else:
                trials = tuple(map(_read_trial, tree["trials"]))
                measured = {t.digest: t for t in trials if isinstance(t.outcome, Measurement)}
                parts |= {"best": measured[tree["best"]["digest"]], "trials": trials}
        except UNREADABLE as error:
            if type(error) is ValueError:
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from error
        record.__dict__.update(parts)
        return record


class StoredRecord(NamedTuple):
    """A record and where it is stored."""

    record: TuningRecord
    location: str
    """Path of the record's file, or ``"memory"``."""

    def is_of_function(self, key: Key) -> bool:
        """Return whether ``key`` has this function name and, for a shipped record, this module."""
        recorded, shipped = self.record.key, self.record.is_shipped
        is_same_module = not shipped or recorded.module == key.module
        return recorded.function == key.function and is_same_module


def _upgraded(tree: codec.Tree) -> dict[str, codec.Tree]:
    """Return ``tree`` in the current schema. Raise ``NewerSchema``, or ``ValueError`` if
    malformed."""
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")
    schema = tree.get("schema")
    if type(schema) is not int or schema < 1:
        raise ValueError(f"its schema is {schema!r}, this version reads 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise NewerSchema(schema, SCHEMA)
    return _from_schema_1(tree) if schema == 1 else tree


def _from_schema_1(tree: Mapping[str, codec.Tree]) -> dict[str, codec.Tree]:
    """Recompute the digests of configs, because in schema 1 they included modules of classes.

    ``function`` remains ``module.qualname`` as in schema 1. A dotted name cannot be split into
    module and function here, so the store compares the whole name.
    """
    try:
        trials = [trial | {"digest": codec.digest(trial["values"])} for trial in tree["trials"]]
        new_digests = {
            old["digest"]: new["digest"] for old, new in zip(tree["trials"], trials, strict=True)
        }
        best = tree["best"] | {"digest": new_digests[tree["best"]["digest"]]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {**tree, "module": "", "signature": "", "trials": trials, "best": best}


def _from_tree_without_trials(tree: Mapping[str, codec.Tree]) -> dict[str, Any]:
    key = Key(
        function=str(tree["function"]),
        text=codec.to_json(tree["key"]),
        hardware=str(tree["hardware_group"]),
        module=str(tree["module"]),
        signature=str(tree["signature"]),
    )
    str(key)  # raises if the key is malformed
    return {
        "key": key,
        "fingerprint": _read_fingerprint(tree["fingerprint"], tree["schema"]),
        "timestamp": str(tree["timestamp"]),
        "seconds": read_number(tree["seconds"]),
        "warm_started_from": str(tree.get("warm_started_from", "")),
        "measured_sizes": tuple(int(read_number(size)) for size in tree.get("at", ())),
        "times_by_rank": {
            str(digest): RankTimes.from_tree(each)
            for digest, each in tree.get("by_rank", {}).items()
        },
        "num_pruned_by_reason": {
            str(name): int(number) for name, number in tree.get("dropped", {}).items()
        },
    }


def _read_trial(tree: Mapping[str, Any]) -> Trial:
    config = tree["values"]
    if codec.digest(config) != tree["digest"]:
        raise ValueError(f"the digest of config {show_config(config)} does not match")
    return Trial(tree["digest"], config, read_outcome(tree))


def _read_fingerprint(tree: Mapping[str, Any], schema: int) -> Fingerprint:
    fingerprint = Fingerprint(**tree) if schema >= 4 else OlderFingerprint(**tree)
    for name, part in tree.items():
        is_text = name in ("space", "version")
        texts = (part,) if is_text else (*part, *part.values()) if type(part) is dict else (0,)
        if not all(isinstance(each, str) for each in texts):
            raise ValueError(f"its fingerprint has the malformed entry {name} = {part!r}")
    return fingerprint


@dataclass(frozen=True)
class Validity:
    """Differences between a record's fingerprint and the present fingerprint, as sentences."""

    reasons: tuple[str, ...]
    """Differences that make the record unusable. The record is valid if there are none."""
    accepted: tuple[str, ...] = ()
    """Differences at patch level, which are accepted unless versions are checked strictly."""


def validity(
    record: TuningRecord, present: Fingerprint, space: ConfigSpace, strict: bool
) -> Validity:
    """Compare ``record`` with the present fingerprint ``present`` and config space ``space``.

    The class of the recorded fingerprint decides what is compared. For a shipped record, less is
    compared than for a record that this machine tuned.

    Args:
        strict: reject differences at patch level (``TRITON_DIST_AUTOTUNE_VERSION_CHECK``).
    """
    found = list(differences(record.fingerprint, present))
    reasons = [d.sentence for d in found if strict or not d.is_patch_level]
    accepted = [d.sentence for d in found if not strict and d.is_patch_level]
    # For a shipped record, ``differences`` does not compare digests of the config space. Any other
    # record fails here only if its file was edited.
    best = record.best
    if not reasons and space.find(best.digest, best.config) is None:
        reasons = [f"config space: the winner {best} is not in it"]
    return Validity(tuple(reasons), tuple(accepted))


_INTERPRETER = " (interpreter)"
"""Suffix of the recorded GPU name if kernels are interpreted."""


def differences(recorded: Fingerprint, present: Fingerprint) -> Iterator[Difference]:
    """Yield the differences between a recorded fingerprint and the present one.

    If the GPU or the use of the interpreter differs, yield only this difference. It may cause all
    other differences, such as driver, libraries, code and config space.
    """
    recorded_gpu, present_gpu = (each.hardware.get("gpu", "") for each in (recorded, present))
    if recorded_gpu == present_gpu:
        yield from recorded.compare(present)
    elif recorded_gpu.endswith(_INTERPRETER) == present_gpu.endswith(_INTERPRETER):
        yield from (d for d in recorded.compare(present) if d.sentence.startswith("hardware: gpu "))
    elif recorded_gpu.removesuffix(_INTERPRETER) == present_gpu.removesuffix(_INTERPRETER):
        condition = (
            "with TRITON_INTERPRET=1, which is not set"
            if recorded_gpu.endswith(_INTERPRETER)
            else ("without TRITON_INTERPRET=1, which is set")
        )
        yield Difference(f"it was made {condition} now", False)
    else:
        how = "with" if recorded_gpu.endswith(_INTERPRETER) else "without"
        yield Difference(
            f"it was made {how} TRITON_INTERPRET=1, on {recorded_gpu}; now it is {present_gpu}",
            False,
        )
