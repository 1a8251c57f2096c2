"""Records that are shipped: packs, one file for each function and model of GPU.

``<root>/<function name>.<anything>.json``. A file is read when a function of that name is looked up
for the first time, and once. What is in it is matched more loosely than a user's own record, so it
comes last, and only for a function of the same module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from triton_dist._tuning.store.disk import expanded, names_in, read_bytes
from triton_dist._tuning.values import Key, StoredRecord, TuningRecord, codec, unpack
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning

PACKAGE_RECORDS = Path(__file__).parents[2] / "records"
"""Those that come with triton_dist."""


def pack_folders(read_only: Sequence[Path]) -> list[Path]:
    """Folders of packs: in each folder of read-only records, then in the package."""
    return [*(folder / "packs" for folder in read_only), PACKAGE_RECORDS]


class PackStore:
    """Packs under ``root``. No operation raises: what cannot be read is a miss and one warning."""

    def __init__(self, root: Path) -> None:
        self._root = expanded(root)
        self._read: dict[Path, Mapping[Key, TuningRecord]] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._paths(key.function_name):
            record = self._pack(path).get(key)
            # Equal keys may be of other functions of that name: nothing else here tells them apart.
            if record is not None and record.key.full_name == key.full_name:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Nothing: packs are made by ``triton-dist pack``."""
        return ""

    def records(self) -> Iterator[StoredRecord]:
        for path in self._paths():
            for record in self._pack(path).values():
                yield StoredRecord(record, str(path))

    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._paths(key.function_name):
            for record in self._pack(path).values():
                if record.key.full_name == key.full_name:
                    yield StoredRecord(record, str(path))

    def _paths(self, function: str | None = None) -> list[Path]:
        """Files of packs, of one function or of all."""
        try:
            names = names_in(self._root)
        except OSError:  # the store of records beside it says so
            return []
        packs = [name for name in names if name.endswith(".json") and name.count(".") > 1]
        return [
            self._root / name
            for name in packs
            if function is None or name.removesuffix(".json").startswith(f"{function}.")
        ]

    def _pack(self, path: Path) -> Mapping[Key, TuningRecord]:
        if path not in self._read:
            self._read[path] = _read(path)
        return self._read[path]


def _read(path: Path) -> Mapping[Key, TuningRecord]:
    try:
        tree = codec.loads(read_bytes(path).decode("ascii"))
        return {record.key: record for record in unpack(tree)}
    except (OSError, ValueError) as error:
        remedy = "Make it again: triton-dist pack"
        warn(f"pack {path} is not used: {error}. {remedy}", CacheWarning)
        return {}
