"""Results that are shipped: packs, one file for each function and model of GPU.

``<root>/<function name>.<anything>.json``. A file is read when a function of that name is looked up
for the first time, and once. What is in it is matched more loosely than a user's own record, so it
comes last, and only for a function of the same module.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from triton_dist._tuning.values import Key, StoredRecord, TuningRecord, unpack
from triton_dist.errors import CacheWarning

PACKAGE_RECORDS = Path(__file__).parents[2] / "records"
"""Those that come with triton_dist."""


def pack_folders(read_only: Sequence[Path]) -> list[Path]:
    """Where packs are looked for: in each folder of read-only records, then in the package."""
    return [*(folder / "packs" for folder in read_only), PACKAGE_RECORDS]


class PackStore:
    """Packs under ``root``. No operation raises: what cannot be read is a miss and one warning."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser()
        self._read: dict[Path, Mapping[Key, TuningRecord]] = {}

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._paths(key.function_name):
            record = self._pack(path).get(key)
            # Equal keys may be of other functions of that name: nothing else here tells them apart.
            if record is not None and record.key.full_name == key.full_name:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Nothing: packs are made by ``python -m triton_dist pack``."""
        return ""

    def records(self) -> Iterator[StoredRecord]:
        for path in self._paths("*"):
            for record in self._pack(path).values():
                yield StoredRecord(record, str(path))

    def _paths(self, function: str) -> list[Path]:
        return sorted(self._root.glob(f"{function}.*.json"))

    def _pack(self, path: Path) -> Mapping[Key, TuningRecord]:
        if path not in self._read:
            self._read[path] = _read(path)
        return self._read[path]


def _read(path: Path) -> Mapping[Key, TuningRecord]:
    try:
        tree = json.loads(path.read_text(encoding="ascii"))
        return {record.key: record for record in unpack(tree)}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(
            f"pack {path} is not used: {error}. Make it again: python -m triton_dist pack",
            CacheWarning,
            stacklevel=2,
        )
        return {}
