"""Many results of one function on one model of GPU as one tree: what is shipped.

Of each record it keeps the key, the sizes at which it was measured, the winner with its median, how
many others were measured, and the medians of the few that a neighbouring size may want to try.
Configs are written once, under the first digits of their digest, and what results have in common
once for all of them, so that a few hundred fit into a file that a person can read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.fingerprint import ShippedFingerprint
from triton_dist._tuning.values.key import Key
from triton_dist._tuning.values.outcome import Measurement, read_number
from triton_dist._tuning.values.record import Trial, TuningRecord
from triton_dist.errors import NewerSchema

PACK_FORMAT = 1
_DIGITS = 8
_ABOUT = ("function", "module", "version", "gpu")
_NEAR, _NEAR_BEST = 8, 1.25
"""So many others, no slower than so many times the winner."""


def pack(records: Sequence[TuningRecord]) -> codec.Tree:
    """The tree of ``records``, at least one: of one function, version and model of GPU, and none of
    a key twice.

    Raises:
        ValueError: they are not.
    """
    about = {
        (r.key.module, r.key.function, r.fingerprint.version, r.fingerprint.hardware.get("gpu"))
        for r in records
    }
    if len(about) != 1 or len({record.key for record in records}) < len(records):
        raise ValueError(f"records of one function, version and GPU with different keys: {about}")
    ((module, function, version, gpu),) = about
    return _assembled(
        {"function": function, "module": module, "version": version, "gpu": gpu},
        [_Result.of(record) for record in records],
    )


def merge(trees: Sequence[codec.Tree]) -> codec.Tree:
    """One tree of several, at least one, of one function, version and model of GPU; the same in
    whatever order they come. Of a key that several have, the result that was found last, and of
    those of one day the one whose digest is the largest."""
    about = {name: trees[0][name] for name in _ABOUT}
    found: dict[tuple[str, str], _Result] = {}
    for result in sorted((each for tree in trees for each in _results(tree)), key=_Result.age):
        found[result.common["hardware_group"], codec.text(result.result["key"])] = result
    return _assembled(about, found.values())


@dataclass(frozen=True)
class _Result:
    """A result of a pack, with what it shares with others there."""

    common: dict[str, codec.Tree]
    result: dict[str, codec.Tree]
    configs: dict[str, codec.Tree]
    """By the first digits of their digests: those that the result names."""

    @classmethod
    def of(cls, record: TuningRecord) -> _Result:
        best, near = record.best, _near(record)
        result = {
            "key": json.loads(record.key.text),
            "config": best.digest[:_DIGITS],
            "ms": _median(best),
            "runners_up": sum(isinstance(t.outcome, Measurement) for t in record.trials) - 1,
            **({"near": {t.digest[:_DIGITS]: _median(t) for t in near}} if near else {}),
            **({"carried": record.carried} if record.carried else {}),
            **({"at": list(record.at)} if record.at else {}),
        }
        configs = {trial.digest[:_DIGITS]: trial.config for trial in (best, *near)}
        return cls(_common(record), result, configs)

    def age(self) -> tuple[str, str]:
        return str(self.common["date"]), codec.digest(self.common, self.result)

    def place(self) -> tuple[Any, ...]:
        """By hardware, then keys with their numbers in order: 16 before 1024."""
        parts = re.split(r"(\d+)", codec.text(self.result["key"]))
        key = [int(part) if i % 2 else part for i, part in enumerate(parts)]
        return self.common["hardware_group"], key


def _results(tree: codec.Tree) -> Iterator[_Result]:
    for group in tree["groups"]:
        common = {name: fact for name, fact in group.items() if name != "results"}
        for result in group["results"]:
            names = [result["config"], *result.get("near", ())]
            yield _Result(common, result, {name: tree["configs"][name] for name in names})


def _assembled(about: Mapping[str, codec.Tree], results: Iterable[_Result]) -> codec.Tree:
    configs: dict[str, codec.Tree] = {}
    groups: dict[str, codec.Tree] = {}
    for each in sorted(results, key=_Result.place):
        configs |= each.configs
        group = groups.setdefault(codec.text(each.common), {**each.common, "results": []})
        group["results"].append(each.result)
    tree = {
        "pack": PACK_FORMAT,
        **about,
        "configs": dict(sorted(configs.items())),
        "groups": list(groups.values()),
    }
    return {**tree, "checksum": _checksum(tree)}


def _checksum(tree: codec.Tree) -> str:
    """Hash all of ``tree`` but its checksum. The layout of the file does not count."""
    parts = {name: part for name, part in tree.items() if name != "checksum"}
    text = json.dumps(parts, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def unpack(tree: codec.Tree) -> Iterator[TuningRecord]:
    """The results in ``tree`` as records, whose winner is the first trial.

    Raises:
        NewerSchema: a later version of triton_dist wrote it.
        ValueError: it is no pack, or damaged; says where.
    """
    if not isinstance(tree, dict) or type(tree.get("pack")) is not int:
        raise ValueError("it is no pack of tuning records")
    if tree["pack"] > PACK_FORMAT:
        raise NewerSchema(tree["pack"], PACK_FORMAT)
    try:
        fits = "checksum" not in tree or tree["checksum"] == _checksum(tree)
    except RecursionError:
        fits = False
    if not fits:  # packs of earlier versions have none
        raise ValueError("its checksum does not fit: it was edited, or is damaged")
    try:
        # Results have most configs in common: each one's digest is made once.
        digests = {name: codec.digest(config) for name, config in tree["configs"].items()}
        for name, digest in digests.items():
            if digest[:_DIGITS] != name:
                raise ValueError(f"the digest of config {name} does not fit")
        for group in tree["groups"]:
            for result in group["results"]:
                yield _record(tree, group, result, digests)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _record(
    tree: Mapping[str, Any],
    group: Mapping[str, Any],
    result: Mapping[str, Any],
    digests: Mapping[str, str],
) -> TuningRecord:
    configs, best = tree["configs"], float(result["ms"])
    # The winner was preferred to those that are as fast within noise: it comes first, and they are
    # not faster here.
    medians = {name: max(float(ms), best) for name, ms in result.get("near", {}).items()}
    measured = {result["config"]: best, **medians}
    fingerprint = ShippedFingerprint(
        hardware={"gpu": str(tree["gpu"])},
        software=_texts(group["tuned_with"]),
        topology=_texts(group["topology"]),
        policy={},
        source={},
        space="",
        version=str(tree["version"]),
    )
    return TuningRecord(
        key=Key(
            function=str(tree["function"]),
            text=codec.text(result["key"]),
            hardware=str(group["hardware_group"]),
            module=str(tree["module"]),
        ),
        fingerprint=fingerprint,
        trials=tuple(
            Trial(digests[name], configs[name], Measurement((ms,), 0))
            for name, ms in measured.items()
        ),
        timestamp=str(group["date"]),
        seconds=0.0,
        carried=str(result.get("carried", "")),
        at=tuple(int(read_number(size)) for size in result.get("at", ())),
    )


def _near(record: TuningRecord) -> list[Trial]:
    """Trials of others that were not much slower than the winner, the fastest first."""
    best = record.best
    others = [
        trial
        for trial in record.trials
        if isinstance(trial.outcome, Measurement)
        and trial.digest != best.digest
        and _median(trial) <= _NEAR_BEST * _median(best)
    ]
    return sorted(others, key=_median)[:_NEAR]


def _median(trial: Trial) -> float:
    assert isinstance(trial.outcome, Measurement)
    return round(trial.outcome.median, 6)


def _common(record: TuningRecord) -> dict[str, codec.Tree]:
    """Facts that a result shares with many others, and that say where it comes from."""
    found = record.fingerprint
    driver = {"driver": found.hardware["driver"]} if "driver" in found.hardware else {}
    return {
        "hardware_group": record.key.hardware,
        "topology": dict(found.topology),
        "tuned_with": {**found.software, **driver},
        "date": record.timestamp.partition("T")[0],
    }


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(fact) for name, fact in facts.items()}
