"""Read records from a folder without writing to it, such as a shared folder of tuned records.

Each record is a JSON file:
``<root>/autotune/<function name>/<digest of the key>-<digest of the origin>.json``. The *origin* is
the module, signature and bound values (closure cells, defaults) of the function, the environment
settings, and the version of the record format. It decides which file a new record replaces, but not
which record is found:

- A look-up reads every file with the digest of the key. The fingerprint in the record decides
  whether the record is valid. After a module was renamed, its old records are found.
- Two functions of equal name in different modules have separate files. Versions of triton_dist with
  different record formats also have separate files, and so do runs with and without debugging.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
from collections.abc import Iterator
from pathlib import Path

from triton_dist._tuning.store.disk import expand_home, names_in, read_bytes
from triton_dist._tuning.store.layout import is_tuner_file, read_record
from triton_dist._tuning.values import SCHEMA, Key, StoredRecord, TuningRecord, codec
from triton_dist._warn import warn
from triton_dist.errors import CacheWarning, NewerSchema

_MAX_NAME_LENGTH = 255
"""Maximum length of a file or folder name in bytes on Linux."""


class ReadOnlyStore:
    """Records under ``root``.

    No method raises. A file that cannot be read is skipped. The store warns once for each damaged
    file, and once in total for files that the file system refuses to read.
    """

    def __init__(self, root: Path) -> None:
        self.root = expand_home(root) / "autotune"
        self._parsed: dict[Path, tuple[tuple[int, int], TuningRecord]] = {}
        """By path: modification time and inode of the file, and the record in it."""
        self._warned: set[Path] = set()
        self._failed_operations: set[str] = set()

    def path(self, key: Key) -> Path:
        """Return the path for a record of ``key``, whether or not the file exists."""
        origin_digest = codec.digest(SCHEMA, key.module, key.signature)[:8]
        return self.folder(key.function_name) / f"{key.digest}-{origin_digest}.json"

    def folder(self, function: str) -> Path:
        """Return the folder of the records of all functions with this name."""
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", function)
        if len(name) > _MAX_NAME_LENGTH:
            name = f"{name[: _MAX_NAME_LENGTH - 9]}-{codec.digest(function)[:8]}"
        return self.root / name

    def find(self, key: Key) -> Iterator[StoredRecord]:
        for path in self._candidate_paths(key):
            record = self._read(path, key)
            if record is not None:
                yield StoredRecord(record, str(path))

    def put(self, record: TuningRecord) -> str:
        """Do nothing: the folder is read-only."""
        return ""

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        folders = self._names_in(self.root) if function is None else [self.folder(function)]
        for folder in folders:
            for name in self._names_in(self.root / folder):
                path = self.root / folder / name
                record = self._read_if_changed(path) if name.endswith(".json") else None
                if record is not None:
                    yield StoredRecord(record, str(path))

    def _read_if_changed(self, path: Path) -> TuningRecord | None:
        """Return the record in ``path``. Parse the file only if it changed since the last call."""
        try:
            status = path.stat()
        except OSError:
            return None
        state = (status.st_mtime_ns, status.st_ino)
        parsed = self._parsed.get(path)
        if parsed is not None and parsed[0] == state:
            return parsed[1]
        record = self._read(path)
        if record is not None:
            self._parsed[path] = state, record
        return record

    def _candidate_paths(self, key: Key) -> Iterator[Path]:
        """Yield the paths that may have a record of ``key``.

        First is the path with an equal origin, last the path in the first format (schema 1).
        """
        path = self.path(key)
        yield path
        for name in self._names_in(path.parent):
            if name != path.name and name.startswith(f"{key.digest}-") and name.endswith(".json"):
                yield path.parent / name
        if key.module:
            yield path.parent / f"{key.schema_1_digest}.json"

    def _names_in(self, folder: Path) -> list[str]:
        try:
            return names_in(folder)
        except OSError as error:
            # Ignore files of other programs next to the folders of functions.
            if folder == self.root or not isinstance(error, NotADirectoryError):
                self._report_io_error("read", folder, f"cannot be read: {error}")
            return []

    def _read(self, path: Path, key: Key | None = None) -> TuningRecord | None:
        """Return the record in ``path``; ``None`` if it is missing, cannot be read, or is of a
        key other than ``key``."""
        try:
            record = read(path)
        except FileNotFoundError:
            return None
        except NewerSchema as error:  # keep the file for the version that wrote it
            self._warn(path, f"is not used: {error}")
            return None
        except OSError as error:
            self._report_io_error("read", path, f"cannot be read: {error}")
            return None
        except ValueError as error:
            if is_tuner_file(path.name):  # ignore files of other programs
                self._report_damaged(path, f"it is damaged ({error!s})")
            return None
        if key is None or record.key == key:
            return record
        if record.key == Key(key.full_name, key.text, key.hardware):  # the key in schema 1
            return dataclasses.replace(record, key=key)
        self._report_damaged(path, f"it is the record of another key, {record.key.text}")
        return None

    def _report_damaged(self, path: Path, reason: str) -> None:
        self._warn(path, f"is not used: {reason}. Delete it or replace it")

    def _warn(self, path: Path, what: str) -> None:
        """Warn once per file, because many keys and process groups may read the same file."""
        if path not in self._warned:
            self._warned.add(path)
            warn(f"tuning record {path} {what}", CacheWarning)

    def _report_io_error(self, operation: str, path: Path, what: str) -> None:
        """Report that the file system refused an access: ``operation`` is "read" or "write".

        Usually all files of a folder are refused. Therefore only the first error of each operation
        leads to a warning, and further errors are logged.
        """
        if operation in self._failed_operations:
            logging.getLogger("triton_dist.cache").info("%s %s", path, what)
        else:
            self._warn(path, what)
        self._failed_operations.add(operation)
        self._warned.add(path)


def read(path: Path) -> TuningRecord:
    """Return the record in ``path``.

    Raise ``OSError`` if the file cannot be read, ``NewerSchema`` if a later version of triton_dist
    wrote it, and ``ValueError`` if it is not a valid record.
    """
    try:
        content = read_bytes(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        content = read_bytes(path)  # NFS: it was replaced from another host while it was open
    return read_record(content)
