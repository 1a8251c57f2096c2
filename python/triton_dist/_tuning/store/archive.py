"""Packs with kernels as wholes: made of records and kernels, merged, and compared."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from triton_dist._archive import Contents, Pack, PackedKernel
from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import (
    Fingerprint,
    Key,
    StoredRecord,
    TuningRecord,
    codec,
    merge,
    pack,
    unpack,
)
from triton_dist.errors import NoSuchFunction, PackRefused

COLUMNS = 200  # a result on one line


def latest(name: str, found: Iterable[TuningRecord]) -> list[TuningRecord]:
    """The last record of each key, of the version that was tuned last. One that was tuned under
    settings, as by a debugging run, counts only where there is no other.

    Args:
        found: records of one function on one model of GPU, at least one.

    Raises:
        NoSuchFunction: the function declares no version.
    """
    by_time = sorted(found, key=lambda record: record.timestamp)
    ordered = sorted(by_time, key=lambda record: not record.fingerprint.settings)
    version = by_time[-1].fingerprint.version
    if not version:
        raise NoSuchFunction(
            name,
            "it declares no version, by which a shipped record could be matched",
            "Decorate it with autotune(..., version='1'), and tune again",
        )
    last: dict[Key, TuningRecord] = {
        record.key: record for record in ordered if record.fingerprint.version == version
    }
    return list(last.values())


def own_records(key: Key, now: Fingerprint, found: Iterable[StoredRecord]) -> list[TuningRecord]:
    """The records of the function of ``key`` among those of functions of its name, all under the
    name that its module has ``now``: a pack answers that name alone.

    One of another module is the function's if its code, constants and version are.
    """
    own = []
    for record, _ in found:
        elsewhere = replace(
            record.fingerprint,
            source=now.source,
            literal=now.literal,
            bound=now.bound,
            version=now.version,
        )
        if record.key.module == key.module or not record.fingerprint.diff(elsewhere):
            own.append(replace(record, key=replace(record.key, module=key.module)))
    return own


def contents_of(records: Iterable[TuningRecord]) -> Contents:
    """A pack without kernels, of the latest records of each function and model of GPU.

    Raises:
        NoSuchFunction: some function declares no version.
    """

    def whose(record: TuningRecord) -> tuple[str, str]:
        return record.key.full_name, str(record.fingerprint.hardware.get("gpu"))

    groups = itertools.groupby(sorted(records, key=whose), whose)
    trees = [pack(latest(name, list(group))) for (name, _), group in groups]
    return _with_trees(trees, {})


def merged(packs: Sequence[Contents]) -> Contents:
    """All that is in some of ``packs``, the same in whatever order they come.

    Of a key that several have, the result that was found last; of a kernel, which is compiled alike
    everywhere but for paths in its metadata, the one whose hashes are the smallest.
    """
    trees = [
        codec.loads(data.decode("ascii"))
        for name, data in itertools.chain.from_iterable(each.records.items() for each in packs)
    ]
    kernels: dict[str, PackedKernel] = {}
    for digest, kernel in itertools.chain.from_iterable(each.kernels.items() for each in packs):
        kernels[digest] = min(kernels.get(digest, kernel), kernel, key=_order)
    return _with_trees(trees, kernels)


def differences(before: Pack, after: Pack) -> Iterator[str]:
    """A line for each result and each kernel that only one has, or that differs."""
    old, new = _results(before), _results(after)
    for key in sorted(old.keys() | new.keys()):
        if key not in new:
            yield f"- {' '.join(key)}: {_winner(old[key])}"
        elif key not in old:
            yield f"+ {' '.join(key)}: {_winner(new[key])}"
        elif old[key].best.digest != new[key].best.digest:
            yield f"! {' '.join(key)}: {_winner(old[key])} -> {_winner(new[key])}"
    for digest in sorted(before.kernels.keys() | after.kernels.keys()):
        one, other = before.kernels.get(digest), after.kernels.get(digest)
        if one is None or other is None:
            sign, entry = ("+", other) if one is None else ("-", one)
            assert entry is not None
            yield f"{sign} kernel {entry.name} {digest[:12]}"
        elif one.files != other.files:
            yield f"! kernel {one.name} {digest[:12]}: other bytes under the same digest"


def verified(path: Path) -> Pack:
    """The pack at ``path``, of which every file was read and found to be what it should be.

    Raises:
        PackRefused: one is not.
        OSError: the pack cannot be read.
    """
    packed = Pack(path)
    packed.contents()
    records_of(packed)
    return packed


def records_of(packed: Pack) -> list[TuningRecord]:
    """All records in it. Raises ``PackRefused``."""
    return [record for name in packed.records for record in records_in(packed, name)]


def records_in(packed: Pack, name: str) -> list[TuningRecord]:
    """Records in one of its files. Raises ``PackRefused``."""
    data = packed.record(name)
    try:
        return list(unpack(codec.loads(data.decode("ascii"))))
    except ValueError as error:
        raise PackRefused(str(packed.path), f"records/{name}", str(error)) from error


def _with_trees(trees: Iterable[codec.Tree], kernels: Mapping[str, PackedKernel]) -> Contents:
    """Trees of one function, version and GPU become one file."""
    files: dict[str, list[codec.Tree]] = {}
    for tree in trees:
        files.setdefault(_file_name(tree), []).append(tree)
    return Contents(
        {
            name: readable_json(merge(parts), COLUMNS).encode("ascii")
            for name, parts in files.items()
        },
        kernels,
    )


def _file_name(tree: codec.Tree) -> str:
    """The function's name, and a digest of what else tells the file apart."""
    last = str(tree["function"]).rpartition(".")[2]
    about = [str(tree[name]) for name in ("module", "function", "version", "gpu")]
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", last)[:100]
    return f"{readable}.{codec.digest(*about)[:8]}.json"


def _order(kernel: PackedKernel) -> tuple[object, ...]:
    entry = kernel.entry
    return sorted(entry.files.items()), sorted(entry.facts.items()), entry.name


def _results(packed: Pack) -> dict[tuple[str, ...], TuningRecord]:
    return {
        (r.key.full_name, r.fingerprint.version, r.key.hardware, r.key.text): r
        for r in records_of(packed)
    }


def _winner(record: TuningRecord) -> str:
    outcome = record.best.outcome
    return f"{record.best.config} {getattr(outcome, 'median', 0):.4g} ms"
