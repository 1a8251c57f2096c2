"""Define the record of one tuning: all trials and the winner. Check whether it is still valid."""

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
    ByRank,
    Measurement,
    Outcome,
    outcome_tree,
    read_number,
    read_outcome,
)
from triton_dist._tuning.values.winner import winner
from triton_dist.errors import NewerSchema, NoValidConfig

SCHEMA = 4
"""Version of the record format; older records can be read. Increase it when an older reader would
misread a record. 2: the function name does not include the module. 3: constants are recorded apart
from the code. 4: a checksum, and digests of Python statements."""


_OPTIONAL = ("version", "literal", "bound", "uncounted")
"""Parts of the fingerprint that are written only if they are not empty."""


@dataclass(frozen=True)
class Trial:
    """One config, as a tree, and its outcome. ``digest`` is the digest of its :class:`Config`."""

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
    """A finished tuning, stored in memory and on disk."""

    key: Key
    fingerprint: Fingerprint
    trials: tuple[Trial, ...]
    timestamp: str
    """End of the tuning, UTC, ISO 8601."""
    seconds: float
    """Duration of the tuning in seconds."""
    warm_started_from: str = ""
    """Source of the records for a warm start; empty without a warm start."""
    at: tuple[int, ...] = ()
    """Sizes of the measured call. Empty if they equal the sizes in the key, the upper end of the
    tuned range."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of pruned configs by reason, of a space that is too large to be listed."""
    by_rank: Mapping[str, ByRank] = field(default_factory=dict)
    """Times per rank of the configs with the most samples, by digest of the config."""

    def __getattr__(self, name: str) -> Any:
        """Parse ``trials`` at first use, if :meth:`from_tree` kept them as JSON text."""
        unread = self.__dict__.get("_unread")
        if name != "trials" or unread is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        trials = tuple(map(_read_trial, codec.loads(unread)))
        self.__dict__["trials"] = trials
        return trials

    @cached_property
    def best(self) -> Trial:
        """The winning trial.

        :func:`~triton_dist._tuning.values.winner.winner` selects it with the indifference of the
        recorded policy.

        Raises:
            NoValidConfig: all configs failed. The error has the cause for each config.
        """
        indifference = float(self.fingerprint.policy.get("indifference", 0.0))
        index = winner([trial.outcome for trial in self.trials], indifference)
        if index is None:
            causes = {str(trial): str(trial.outcome) for trial in self.trials}
            causes |= {f"{count} configs": reason for reason, count in self.dropped.items()}
            raise NoValidConfig(self.key.full_name, self.key, causes)
        return self.trials[index]

    @property
    def shipped(self) -> bool:
        """True for a record from a pack, which has few trials and a loose fingerprint."""
        return isinstance(self.fingerprint, ShippedFingerprint)

    @property
    def digest(self) -> str:
        """Digest that identifies this tuning among all tunings of the key.

        It covers the end time, the duration to the nanosecond, and the winner.
        """
        best = self.best
        milliseconds = outcome_tree(best.outcome)["ms"]
        return codec.digest(
            self.key.digest, self.timestamp, self.seconds, best.digest, milliseconds
        )

    def to_tree(self) -> codec.Tree:
        """Return the tree for a file, with the most interesting parts first."""
        best = self.best
        rare = {
            "warm_started_from": self.warm_started_from,
            "at": list(self.at),
            "dropped": dict(self.dropped),
            "by_rank": {digest: own.to_tree() for digest, own in self.by_rank.items()},
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
            **{name: part for name, part in rare.items() if part},
            "hardware_group": self.key.hardware,
            "fingerprint": {
                name: facts if isinstance(facts, str) else dict(facts)
                for name, facts in vars(self.fingerprint).items()
                if name not in _OPTIONAL or facts
            },
        }

    @classmethod
    def from_tree(
        cls, tree: codec.Tree, best: codec.Tree = None, unread: bytes = b""
    ) -> TuningRecord:
        """Return the record in a tree written by :meth:`to_tree`.

        Args:
            unread: JSON text of the trials, if ``tree`` lacks them. The caller has verified its
                checksum. The trials are parsed at first use.
            best: tree of the winner, in addition to ``unread``.

        Raises:
            NewerSchema: a later version of triton_dist wrote the tree, which may be undamaged.
            ValueError: the tree is malformed, for the reason in the message.
        """
        tree, record = _upgraded(tree), object.__new__(cls)
        try:
            parts = _from_tree_without_trials(tree)
            if unread:
                parts |= {"best": _read_trial(best), "_unread": unread}
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
    """A record returned by a store."""

    record: TuningRecord
    where: str
    """Path of its file, or ``"memory"``."""

    def is_of(self, key: Key) -> bool:
        """Return whether this record and ``key`` have the same function.

        A shipped record must also have the same module.
        """
        own, shipped = self.record.key, self.record.shipped
        return own.function == key.function and (not shipped or own.module == key.module)


def _upgraded(tree: codec.Tree) -> dict[str, codec.Tree]:
    """Convert ``tree`` to the current schema."""
    if not isinstance(tree, dict):
        raise ValueError("it is not a JSON object")
    schema = tree.get("schema")
    if type(schema) is not int or schema < 1:
        raise ValueError(f"its schema is {schema!r}, this version reads 1 to {SCHEMA}")
    if schema > SCHEMA:
        raise NewerSchema(schema, SCHEMA)
    return _from_schema_1(tree) if schema == 1 else tree


def _from_schema_1(tree: Mapping[str, codec.Tree]) -> dict[str, codec.Tree]:
    """Recompute the digests of configs, which included the modules of classes in schema 1.

    ``function`` remains ``module.qualname`` as in schema 1, because it cannot be split here. The
    store compares the whole name.
    """
    try:
        trials = [trial | {"digest": codec.digest(trial["values"])} for trial in tree["trials"]]
        now = {
            old["digest"]: new["digest"] for old, new in zip(tree["trials"], trials, strict=True)
        }
        best = tree["best"] | {"digest": now[tree["best"]["digest"]]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {**tree, "module": "", "signature": "", "trials": trials, "best": best}


def _from_tree_without_trials(tree: Mapping[str, codec.Tree]) -> dict[str, Any]:
    key = Key(
        function=str(tree["function"]),
        text=codec.text(tree["key"]),
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
        "at": tuple(int(read_number(size)) for size in tree.get("at", ())),
        "by_rank": {
            str(digest): ByRank.from_tree(own) for digest, own in tree.get("by_rank", {}).items()
        },
        "dropped": {str(name): int(number) for name, number in tree.get("dropped", {}).items()},
    }


def _read_trial(tree: Mapping[str, Any]) -> Trial:
    config = tree["values"]
    if codec.digest(config) != tree["digest"]:
        raise ValueError(f"the digest of config {show_config(config)} does not match")
    return Trial(tree["digest"], config, read_outcome(tree))


def _read_fingerprint(tree: Mapping[str, Any], schema: int) -> Fingerprint:
    fingerprint = Fingerprint(**tree) if schema >= 4 else OlderFingerprint(**tree)
    for name, facts in tree.items():
        is_text = name in ("space", "version")
        texts = (facts,) if is_text else (*facts, *facts.values()) if type(facts) is dict else (0,)
        if not all(isinstance(each, str) for each in texts):
            raise ValueError(f"its fingerprint has the malformed entry {name} = {facts!r}")
    return fingerprint


@dataclass(frozen=True)
class Validity:
    """Validity of a record. Each sentence names a field, its recorded and its present value."""

    reasons: tuple[str, ...]
    """Differences that make the record unusable; empty if it is valid."""
    tolerated: tuple[str, ...] = ()
    """Accepted differences: patch levels, unless versions are checked strictly."""


def validity(record: TuningRecord, now: Fingerprint, space: ConfigSpace, strict: bool) -> Validity:
    """Return whether ``record`` is valid for fingerprint ``now`` and config space ``space``.

    The class of the recorded fingerprint decides what is compared. A shipped record compares less
    than a user's own record.

    Args:
        strict: reject differences at patch level (``TRITON_DIST_AUTOTUNE_VERSION_CHECK``).
    """
    found = list(differences(record.fingerprint, now))
    reasons = [d.sentence for d in found if strict or not d.patch_level]
    tolerated = [d.sentence for d in found if not strict and d.patch_level]
    # For a shipped record, this check replaces the comparison of space digests in ``differences``.
    # Other records fail here only if they were edited.
    best = record.best
    if not reasons and space.find(best.digest, best.config) is None:
        reasons = [f"config space: the winner {best} is not in it"]
    return Validity(tuple(reasons), tuple(tolerated))


_INTERPRETER = " (interpreter)"
"""Suffix of the hardware name if kernels are interpreted."""


def differences(then: Fingerprint, now: Fingerprint) -> Iterator[Difference]:
    """Yield the differences worth reporting.

    If the GPU or the use of the interpreter differs, yield only that difference. It may be the
    cause of all others: driver, libraries, code and config space.
    """
    was, is_ = (each.hardware.get("gpu", "") for each in (then, now))
    if was == is_:
        yield from then.compare(now)
    elif was.endswith(_INTERPRETER) == is_.endswith(_INTERPRETER):
        yield from (d for d in then.compare(now) if d.sentence.startswith("hardware: gpu "))
    elif was.removesuffix(_INTERPRETER) == is_.removesuffix(_INTERPRETER):
        made = (
            "with TRITON_INTERPRET=1, which is not set"
            if was.endswith(_INTERPRETER)
            else ("without TRITON_INTERPRET=1, which is set")
        )
        yield Difference(f"it was made {made} now", False)
    else:
        how = "with" if was.endswith(_INTERPRETER) else "without"
        yield Difference(f"it was made {how} TRITON_INTERPRET=1, on {was}; now it is {is_}", False)
