"""One readable JSON file a record, in a folder that any number of jobs and hosts may share.

``<root>/autotune/<function name>/<digest of the key>.json``. A reader needs no lock: a file is
replaced in one step and never changed, so it is read whole or not at all. Writers take a lock a
folder, so that none sets aside as damaged what another has just replaced.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from triton_dist._tuning.store.layout import readable_json
from triton_dist._tuning.values import Key, TuningRecord
from triton_dist.errors import CacheWarning

_LOCK_SECONDS = 10.0


class FileStore:
    """Records under ``root``. No operation raises: what the disk refuses is a miss and a
    warning."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser() / "autotune"
        self._write_failed = False

    def path(self, key: Key) -> Path:
        """The file of ``key``'s record, whether or not it is there."""
        folder = re.sub(r"[^A-Za-z0-9_.-]", "_", key.function_name)
        return self.root / folder / f"{key.digest}.json"

    def describe(self, key: Key) -> str:
        return str(self.path(key))

    def get(self, key: Key) -> TuningRecord | None:
        path = self.path(key)
        try:
            record = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            _warn(f"tuning record {path} cannot be read ({error}); tuning again")
            return None
        except ValueError as error:
            self._set_aside(path, str(error))
            return None
        if record.key != key:
            self._set_aside(path, f"it is the record of another key, {record.key.text}")
            return None
        return record

    def put(self, record: TuningRecord) -> None:
        path = self.path(record.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _lock(path.parent):
                _write(path, readable_json(record.to_tree()))
        except (OSError, Timeout) as error:
            if not self._write_failed:  # a full disk is full for every record: said once
                _warn(f"tuning record {path} cannot be written ({error}); it stays in memory")
            self._write_failed = True

    def records(self) -> Iterator[TuningRecord]:
        """Every record that can be read, by folder and name."""
        for path in sorted(self.root.glob("*/*.json")):
            try:
                yield _read(path)
            except (OSError, ValueError) as error:
                _warn(f"tuning record {path} is left out: {error}")

    def _set_aside(self, path: Path, reason: str) -> None:
        """Rename a damaged file, so that it is looked at once and can still be examined."""
        aside = path.with_name(path.name + ".damaged")
        try:
            with _lock(path.parent):
                if _is_damaged(path):
                    os.replace(path, aside)
            _warn(
                f"tuning record {path} is not used: {reason}. It is now {aside.name}; tuning again"
            )
        except (OSError, Timeout) as error:
            _warn(f"tuning record {path} is not used: {reason}. It stays ({error}); tuning again")


def _read(path: Path) -> TuningRecord:
    """Raises ``ValueError`` for anything that is not a record."""
    try:
        return TuningRecord.from_tree(json.loads(path.read_bytes()))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _is_damaged(path: Path) -> bool:
    """Whether it still is, now that the lock is held; a whole record of another key's digest is
    too."""
    try:
        return _read(path).key.digest != path.stem
    except FileNotFoundError:
        return False
    except ValueError:
        return True


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / ".lock", timeout=_LOCK_SECONDS)


def _write(path: Path, text: str) -> None:
    """Replace ``path`` in one step, and only by what has reached the disk."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)


def _warn(message: str) -> None:
    warnings.warn(message, CacheWarning, stacklevel=3)
