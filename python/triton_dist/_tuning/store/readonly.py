"""Records in a folder that is looked into and never written, such as pre-tuned ones that are
shipped.

``<root>/autotune/<function name>/<digest of the key>-<place>.json``, one readable JSON file a
record. The *place* stands for the function's module, signature and bound values, for settings of
the environment, and for the schema: it says which record a new one replaces, not which one answers.
So

- a key is answered by every file with its digest; what a record depends on decides whether it can
  be used. A module that was renamed finds what was tuned under its old name;
- two functions of one name, two versions of triton_dist with different schemas, and a run with
  debugging on and one without keep a file each and do not overwrite one another's.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from triton_dist._tuning.store.disk import expanded, names_in, read_bytes
from triton_dist._tuning.store.layout import read_record
from triton_dist._tuning.values import SCHEMA, Key, StoredRecord, TuningRecord, codec
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, NewerSchema

_OURS = re.compile(r"[0-9a-f]{32}(-.*)?\.json")
"""The names of records: with the digest of the key, and the place."""

_LONGEST_NAME = 255
"""Bytes, of a file or folder, on all file systems of Linux."""


class ReadOnlyStore:
    """Records under ``root``. No operation raises: what cannot be read is a miss, and a warning:
    one for each damaged file, and one for all that the disk refuses."""

    def __init__(self, root: Path) -> None:
        self.root = expanded(root) / "autotune"
        self._known: dict[Path, tuple[tuple[int, int], TuningRecord]] = {}
        """Records of other keys than the one that is looked up, with the state of their files."""
        self._warned: set[Path] = set()
        self._refused: set[str] = set()

    def path(self, key: Key) -> Path:
        """The file that a record of ``key`` is written to, whether or not it is there."""
        place = codec.digest(SCHEMA, key.module, key.signature)[:8]
        return self.folder(key.function_name) / f"{key.digest}-{place}.json"

    def folder(self, function: str) -> Path:
        """Folder of the records of functions of that name."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", function)
        if len(name) > _LONGEST_NAME:
            name = f"{name[: _LONGEST_NAME - 9]}-{codec.digest(function)[:8]}"
        return self.root / name

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._candidates(key):
            record = self._read(path, key)
            if record is not None:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Nothing: the folder is somebody else's."""
        return ""

    def records(self) -> Iterator[StoredRecord]:
        for folder in self._names_in(self.root):
            yield from self._records_in(self.root / folder, self._read)

    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        found = self._records_in(self.folder(key.function_name), self._unchanged)
        return (each for each in found if each.record.key.function == key.function)

    def _unchanged(self, path: Path) -> TuningRecord | None:
        """The record in ``path``, read again only if the file is another one: a function may have
        a hundred, which are looked at at each new key."""
        try:
            found = path.stat()
        except OSError:
            return None
        state = (found.st_mtime_ns, found.st_ino)
        known = self._known.get(path)
        if known is not None and known[0] == state:
            return known[1]
        record = self._read(path)
        if record is not None:
            self._known[path] = state, record
        return record

    def _records_in(
        self, folder: Path, read: Callable[[Path], TuningRecord | None]
    ) -> Iterator[StoredRecord]:
        for name in self._names_in(folder):
            path = folder / name
            record = read(path) if name.endswith(".json") else None
            if record is not None:
                yield StoredRecord(record, str(path))

    def _candidates(self, key: Key) -> Iterator[Path]:
        """The function's own place first, then the others, and last the name of schema 1."""
        own = self.path(key)
        yield own
        for name in self._names_in(own.parent):
            if name != own.name and name.startswith(f"{key.digest}-") and name.endswith(".json"):
                yield own.parent / name
        if key.module:
            yield own.parent / f"{key.schema_1_digest}.json"

    def _names_in(self, folder: Path) -> list[str]:
        try:
            return names_in(folder)
        except OSError as error:
            # A file beside the folders of functions is none of ours.
            if folder == self.root or not isinstance(error, NotADirectoryError):
                self._refuse("read", folder, f"cannot be read: {error}")
            return []

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
            self._refuse("read", path, f"cannot be read: {error}")
            return None
        except ValueError as error:
            if _OURS.fullmatch(path.name):  # else somebody else's, and none of our business
                self._damaged(path, f"it is damaged ({error!s})")
            return None
        if key is None or record.key == key:
            return record
        if record.key == key.in_schema_1:
            return dataclasses.replace(record, key=key)
        self._damaged(path, f"it is the record of another key, {record.key.text}")
        return None

    def _damaged(self, path: Path, reason: str) -> None:
        """Called for a file that is no record, or not the one that its name says."""
        self._warn(path, f"is not used: {reason}. Delete it, or write it anew")

    def _warn(self, path: Path, what: str) -> None:
        """Said once a file; a program may look it up for each of many keys and groups."""
        if path not in self._warned:
            self._warned.add(path)
            warn(f"tuning record {path} {what}", CacheWarning)

    def _refuse(self, use: str, path: Path, what: str) -> None:
        """Said once for reading and once for writing, and not for both of one file: what is closed
        is closed for every record."""
        if use in self._refused:
            logging.getLogger("triton_dist.cache").info("%s %s", path, what)
        else:
            self._warn(path, what)
        self._refused.add(use)
        self._warned.add(path)


def read(path: Path) -> TuningRecord:
    """The record in ``path``.

    Raises:
        NewerSchema, ValueError: it is none, or none that this version can read.
        OSError: the file cannot be read.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        content = read_bytes(path)  # NFS: it was replaced from another host while it was open
    return read_record(content)
