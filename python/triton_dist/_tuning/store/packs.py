"""Records that are shipped: packs, one file for each function and model of GPU, or with kernels.

``<root>/<function name>.<anything>.json`` is read when a function of that name is looked up for the
first time, ``<root>/<anything>.tdpack`` when any is; each once. What is in them is matched more
loosely than a user's own record, so it comes last, and only for a function of the same module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from triton_dist._archive import LARGEST_RECORDS, SUFFIX, opened
from triton_dist._tuning.store.archive import records_in
from triton_dist._tuning.store.disk import expanded, names_in, read_bytes
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord, codec, unpack
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, PackRefused


class PackStore:
    """Packs under ``root``, or the one that it is. No operation raises: what cannot be read is a
    miss and one warning."""

    def __init__(self, root: Path) -> None:
        self._root = expanded(root)
        self._read: dict[Path, Mapping[Key, list[TuningRecord]]] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._paths(key.function_name):
            for record in self._pack(path).get(key, ()):
                # Equal keys may be of other functions of that name: nothing else tells them apart.
                if record.key.full_name == key.full_name:
                    yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Nothing: packs are made by ``triton-dist pack``."""
        return ""

    def records(self) -> Iterator[StoredRecord]:
        for path in self._paths():
            for record in itertools.chain.from_iterable(self._pack(path).values()):
                yield StoredRecord(record, str(path))

    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._paths(key.function_name):
            for record in itertools.chain.from_iterable(self._pack(path).values()):
                if record.key.full_name == key.full_name:
                    yield StoredRecord(record, str(path))

    def _paths(self, function: str | None = None) -> list[Path]:
        """Files of packs, of one function or of all."""
        if self._root.suffix == SUFFIX:
            return [self._root]
        try:
            names = names_in(self._root)
        except OSError:  # the store of records beside it says so
            return []
        of = "" if function is None else f"{function}."
        return [
            self._root / name
            for name in names
            if name.endswith(SUFFIX)
            or (name.endswith(".json") and name.count(".") > 1 and name.startswith(of))
        ]

    def _pack(self, path: Path) -> Mapping[Key, list[TuningRecord]]:
        if path not in self._read:
            self._read[path] = _read(path)
        return self._read[path]


def _read(path: Path) -> Mapping[Key, list[TuningRecord]]:
    """Records by key; several where functions of one name, or versions of one, have it."""
    found: dict[Key, list[TuningRecord]] = {}
    for record in _of_archive(path) if path.suffix == SUFFIX else _of_json(path):
        found.setdefault(record.key, []).append(record)
    return found


def _of_archive(path: Path) -> Iterator[TuningRecord]:
    """Records of a pack with kernels: of each file in it that is not damaged."""
    pack = opened(path)
    if pack is None:
        return
    for name in pack.records:
        try:
            yield from records_in(pack, name)
        except PackRefused as error:
            warn(str(error), CacheWarning)


def _of_json(path: Path) -> list[TuningRecord]:
    try:
        return list(unpack(codec.loads(read_bytes(path, LARGEST_RECORDS).decode("ascii"))))
    except (OSError, ValueError) as error:
        remedy = "Make it again: triton-dist pack"
        warn(f"pack {path} is not used: {error}. {remedy}", CacheWarning)
        return []
