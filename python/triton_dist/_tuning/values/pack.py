"""Convert records to the JSON tree of a file in a pack, and back.

A pack ships results to other machines. A file in it has the results of one function on one GPU
model. Each result has its key, the measured sizes, the winner with its median, and the number of
other measured configs. It also has the medians of the best other configs, which are tried first at
neighbouring sizes. Configs, versions and dates that several results share are written once, so that
hundreds of results fit into a readable file.
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
_NUM_DIGITS = 8
"""Number of characters of a config's digest that name the config in the file."""
_PACK_FIELDS = ("function", "module", "version", "gpu")
_MAX_RUNNERS_UP, _MAX_RUNNER_UP_RATIO = 8, 1.25
"""Per record: maximum number of other configs to keep. Their median may be at most this multiple of
the winner's median."""


def pack(records: Sequence[TuningRecord]) -> codec.Tree:
    """Return the tree of one or more ``records`` of one function, version and GPU model."""
    key, fingerprint = records[0].key, records[0].fingerprint
    fields = key.function, key.module, fingerprint.version, fingerprint.hardware.get("gpu")
    pack_fields = dict(zip(_PACK_FIELDS, fields, strict=True))
    return _assembled(pack_fields, [_Result.of(record) for record in records])


def merge(trees: Sequence[codec.Tree]) -> codec.Tree:
    """Return the union of ``trees`` of one function, version and GPU model.

    The order of ``trees`` has no effect. If a key is in several trees, the result with the latest
    date is kept, and among results of one day the result with the largest digest.
    """
    pack_fields = {name: trees[0][name] for name in _PACK_FIELDS}
    latest: dict[tuple[str, str], _Result] = {}
    for result in sorted((each for tree in trees for each in _results(tree)), key=_Result.age_key):
        latest[result.group["hardware_group"], codec.to_json(result.result["key"])] = result
    return _assembled(pack_fields, latest.values())


@dataclass(frozen=True)
class _Result:
    """One result, as the parts of the file that describe it."""

    group: dict[str, codec.Tree]
    """Hardware group, topology, versions and date, which are written once for several results."""
    result: dict[str, codec.Tree]
    configs: dict[str, codec.Tree]
    """The configs that ``result`` names, by the first 8 characters of their digests."""

    @classmethod
    def of(cls, record: TuningRecord) -> _Result:
        best, runners_up = record.best, _runners_up(record)
        result = {
            "key": json.loads(record.key.text),
            "config": best.digest[:_NUM_DIGITS],
            "ms": _median(best),
            "runners_up": sum(isinstance(t.outcome, Measurement) for t in record.trials) - 1,
        }
        optional = {
            "near": {t.digest[:_NUM_DIGITS]: _median(t) for t in runners_up},
            "warm_started_from": record.warm_started_from,
            "at": list(record.measured_sizes),
        }
        result |= {name: part for name, part in optional.items() if part}
        configs = {trial.digest[:_NUM_DIGITS]: trial.config for trial in (best, *runners_up)}
        fingerprint = record.fingerprint
        hardware = fingerprint.hardware
        driver = {"driver": hardware["driver"]} if "driver" in hardware else {}
        group = {
            "hardware_group": record.key.hardware,
            "topology": dict(fingerprint.topology),
            "tuned_with": {**fingerprint.software, **driver},
            "date": record.timestamp.partition("T")[0],
        }
        return cls(group, result, configs)

    def age_key(self) -> tuple[str, str]:
        """Return a sort key: by date, then by digest."""
        return str(self.group["date"]), codec.digest(self.group, self.result)

    def file_key(self) -> tuple[Any, ...]:
        """Return a sort key: by hardware, then by key with numbers in numeric order."""
        parts = re.split(r"(\d+)", codec.to_json(self.result["key"]))
        key = [int(part) if i % 2 else part for i, part in enumerate(parts)]
        return self.group["hardware_group"], key


def _results(tree: codec.Tree) -> Iterator[_Result]:
    for group in tree["groups"]:
        shared = {name: part for name, part in group.items() if name != "results"}
        for result in group["results"]:
            names = [result["config"], *result.get("near", ())]
            yield _Result(shared, result, {name: tree["configs"][name] for name in names})


def _assembled(pack_fields: Mapping[str, codec.Tree], results: Iterable[_Result]) -> codec.Tree:
    configs: dict[str, codec.Tree] = {}
    groups: dict[str, codec.Tree] = {}
    for each in sorted(results, key=_Result.file_key):
        configs |= each.configs
        group = groups.setdefault(codec.to_json(each.group), {**each.group, "results": []})
        group["results"].append(each.result)
    tree = {
        "pack": PACK_FORMAT,
        **pack_fields,
        "configs": dict(sorted(configs.items())),
        "groups": list(groups.values()),
    }
    return {**tree, "checksum": _checksum(tree)}


def _checksum(tree: codec.Tree) -> str:
    """Return a hash of ``tree`` without its checksum. The layout of the file has no effect."""
    parts = {name: part for name, part in tree.items() if name != "checksum"}
    text = json.dumps(parts, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def unpack(tree: codec.Tree) -> Iterator[TuningRecord]:
    """Yield the results in ``tree`` as records. The first trial of each record is the winner.

    Raises:
        NewerSchema: a later version of triton_dist wrote the tree.
        ValueError: the tree is damaged or is not a pack.
    """
    if not isinstance(tree, dict) or type(tree.get("pack")) is not int:
        raise ValueError("it is not a pack of tuning records")
    if tree["pack"] > PACK_FORMAT:
        raise NewerSchema(tree["pack"], PACK_FORMAT)
    try:
        is_intact = "checksum" not in tree or tree["checksum"] == _checksum(tree)
    except RecursionError:
        is_intact = False
    if not is_intact:  # packs of earlier versions have no checksum
        raise ValueError("its checksum does not match: it was edited or is damaged")
    try:
        # Results share most configs: hash each config once.
        digests = {name: codec.digest(config) for name, config in tree["configs"].items()}
        for name, digest in digests.items():
            if digest[:_NUM_DIGITS] != name:
                raise ValueError(f"the digest of config {name} does not match")
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
    # Within noise, the median of the winner may exceed the median of another config. Raise the
    # other median to the winner's, so that the record selects the same winner.
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
            text=codec.to_json(result["key"]),
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
        warm_started_from=str(result.get("warm_started_from", "")),
        measured_sizes=tuple(int(read_number(size)) for size in result.get("at", ())),
    )


def _runners_up(record: TuningRecord) -> list[Trial]:
    """Return the trials of at most 8 other configs that are nearly as fast as the winner, fastest
    first."""
    best = record.best
    others = [
        trial
        for trial in record.trials
        if isinstance(trial.outcome, Measurement)
        and trial.digest != best.digest
        and _median(trial) <= _MAX_RUNNER_UP_RATIO * _median(best)
    ]
    return sorted(others, key=_median)[:_MAX_RUNNERS_UP]


def _median(trial: Trial) -> float:
    assert isinstance(trial.outcome, Measurement)
    return round(trial.outcome.median, 6)


def _texts(tree: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in tree.items()}
