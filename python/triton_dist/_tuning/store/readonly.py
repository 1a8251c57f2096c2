"""Records in a folder that is looked into and never written, such as pre-tuned ones that are
shipped.

``<root>/autotune/<function name>/<digest of the key>-<place>.json``, one readable JSON file a
record. The *place* stands for the function's module and signature and for the schema: it says which
record a new one replaces, not which one answers. So

- a key is answered by every file with its digest; what a record depends on decides whether it can
  be used. A module that was renamed finds what was tuned under its old name;
- two functions of one name, and two versions of triton_dist with different schemas, keep a file
  each and do not overwrite one another's.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from triton_dist._tuning.values import SCHEMA, Key, StoredRecord, TuningRecord, codec
from triton_dist.errors import CacheWarning, NewerSchema


class ReadOnlyStore:
    """Records under ``root``. No operation raises: what cannot be read is a miss and one
    warning."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser() / "autotune"
        self._warned: set[Path] = set()

    def path(self, key: Key) -> Path:
        """The file that a record of ``key`` is written to, whether or not it is there."""
        folder = re.sub(r"[^A-Za-z0-9_.-]", "_", key.function_name)
        place = codec.digest(SCHEMA, key.module, key.signature)[:8]
        return self.root / folder / f"{key.digest}-{place}.json"

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._candidates(key):
            record = self._read(path, key)
            if record is not None:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Nothing: the folder is somebody else's."""
        return ""

    def records(self) -> Iterator[StoredRecord]:
        for path in sorted(self.root.glob("*/*.json")):
            record = self._read(path)
            if record is not None:
                yield StoredRecord(record, str(path))

    def _candidates(self, key: Key) -> Iterator[Path]:
        """The function's own place first, then the others, and last the name of schema 1."""
        own = self.path(key)
        yield own
        yield from sorted(set(own.parent.glob(f"{key.digest}-*.json")) - {own})
        if key.module:
            yield own.parent / f"{key.schema_1_digest}.json"

    def _read(self, path: Path, key: Key | None = None) -> TuningRecord | None:
        """The record in ``path``; ``None`` if there is none, or not one of ``key``."""
        try:
            record = read(path)
        except FileNotFoundError:
            return None
        except NewerSchema as error:  # left where it is: the version that wrote it needs it
            self._warn(path, f"is not used: {error}")
            return None
        except OSError as error:
            self._warn(path, f"cannot be read: {error}")
            return None
        except ValueError as error:
            self._damaged(path, str(error))
            return None
        if key is None or record.key == key:
            return record
        if record.key == key.in_schema_1:
            return dataclasses.replace(record, key=key)
        self._damaged(path, f"it is the record of another key, {record.key.text}")
        return None

    def _damaged(self, path: Path, reason: str) -> None:
        """Called for a file that is no record, or not the one that its name says."""
        self._warn(path, f"is not used: {reason}")

    def _warn(self, path: Path, what: str) -> None:
        """Said once a file; a program may look it up for each of many keys and groups."""
        if path not in self._warned:
            self._warned.add(path)
            warnings.warn(f"tuning record {path} {what}", CacheWarning, stacklevel=2)


def read(path: Path) -> TuningRecord:
    """The record in ``path``.

    Raises:
        NewerSchema, ValueError: it is none, or none that this version can read.
        OSError: the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        content = path.read_bytes()  # NFS: it was replaced from another host while it was open
    try:
        return TuningRecord.from_tree(json.loads(content))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
