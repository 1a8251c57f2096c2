"""Read records from a folder without writing to it, such as a shared folder of tuned records.

Each record is a readable JSON file:
``<root>/autotune/<function name>/<digest of the key>-<place>.json``. The *place* is a digest of the
module, signature and bound values (closure cells, defaults) of the function, of environment
settings, and of the schema. It decides which record a new record replaces, but not which record is
found:

- A lookup considers every file with the digest of the key. The fingerprint of the record decides
  whether it is valid. A renamed module finds records tuned under its old name.
- Two functions of equal name have separate files. So do versions of triton_dist with different
  schemas, and runs with and without debugging.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from triton_dist._tuning.store.disk import expanded, names_in, read_bytes
from triton_dist._tuning.store.layout import is_ours, read_record
from triton_dist._tuning.values import SCHEMA, Key, StoredRecord, TuningRecord, codec
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, NewerSchema

_MAX_NAME_LENGTH = 255
"""Maximum length of a file or folder name in bytes on Linux."""


class ReadOnlyStore:
    """Records under ``root``.

    No operation raises. A file that cannot be read is a miss. Warn once for each damaged file, and
    once for all files that the file system refuses to read.
    """

    def __init__(self, root: Path) -> None:
        self.root = expanded(root) / "autotune"
        self._known: dict[Path, tuple[tuple[int, int], TuningRecord]] = {}
        """Records from :meth:`records`, by path, with the state of the file."""
        self._warned: set[Path] = set()
        self._failed_operations: set[str] = set()

    def path(self, key: Key) -> Path:
        """Return the path for a record of ``key``, whether or not the file exists."""
        place = codec.digest(SCHEMA, key.module, key.signature)[:8]
        return self.folder(key.function_name) / f"{key.digest}-{place}.json"

    def folder(self, function: str) -> Path:
        """Return the folder of the records of all functions with this name."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", function)
        if len(name) > _MAX_NAME_LENGTH:
            name = f"{name[: _MAX_NAME_LENGTH - 9]}-{codec.digest(function)[:8]}"
        return self.root / name

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._candidates(key):
            record = self._read(path, key)
            if record is not None:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Do nothing: the folder is read-only."""
        return ""

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        every = function is None
        for folder in self._names_in(self.root) if every else [self.folder(function or "")]:
            for name in self._names_in(self.root / folder):
                path = self.root / folder / name
                record = self._unchanged(path) if name.endswith(".json") else None
                if record is not None:
                    yield StoredRecord(record, str(path))

    def _unchanged(self, path: Path) -> TuningRecord | None:
        """Return the record in ``path``; parse the file only if it changed.

        Each new key reads all records of its function, which may be hundreds.
        """
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

    def _candidates(self, key: Key) -> Iterator[Path]:
        """Yield paths of records of ``key``: first its own place, last the places of schema 1."""
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
            # Ignore foreign files next to the folders of functions.
            if folder == self.root or not isinstance(error, NotADirectoryError):
                self._report_refusal("read", folder, f"cannot be read: {error}")
            return []

    def _read(self, path: Path, key: Key | None = None) -> TuningRecord | None:
        """Return the record in ``path``; ``None`` if it is missing, invalid or of another key."""
        try:
            record = read(path)
        except FileNotFoundError:
            return None
        except NewerSchema as error:  # keep the file for the version that wrote it
            self._warn(path, f"is not used: {error}")
            return None
        except OSError as error:
            self._report_refusal("read", path, f"cannot be read: {error}")
            return None
        except ValueError as error:
            if is_ours(path.name):  # ignore foreign files
                self._damaged(path, f"it is damaged ({error!s})")
            return None
        if key is None or record.key == key:
            return record
        if record.key == Key(key.full_name, key.text, key.hardware):  # the key in schema 1
            return dataclasses.replace(record, key=key)
        self._damaged(path, f"it is the record of another key, {record.key.text}")
        return None

    def _damaged(self, path: Path, reason: str) -> None:
        """Handle a file that is not a record, or that has a record of another key."""
        self._warn(path, f"is not used: {reason}. Delete it or replace it")

    def _warn(self, path: Path, what: str) -> None:
        """Warn once per file, because a program may look it up for many keys and groups."""
        if path not in self._warned:
            self._warned.add(path)
            warn(f"tuning record {path} {what}", CacheWarning)

    def _report_refusal(self, operation: str, path: Path, what: str) -> None:
        """Report that the file system refused an access: ``operation`` is "read" or "write".

        The file system usually refuses all records of a folder. The first error of each operation
        is a warning, unless this file has had a warning. Further errors are only logged.
        """
        if operation in self._failed_operations:
            logging.getLogger("triton_dist.cache").info("%s %s", path, what)
        else:
            self._warn(path, what)
        self._failed_operations.add(operation)
        self._warned.add(path)


def read(path: Path) -> TuningRecord:
    """Return the record in ``path``.

    Raises:
        NewerSchema: a later version of triton_dist wrote the record.
        ValueError: the file is not a valid record.
        OSError: the file cannot be read.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        content = read_bytes(path)  # NFS: it was replaced from another host while it was open
    return read_record(content)
