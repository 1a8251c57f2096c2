"""Store the user's records in a folder that jobs and hosts may share, on a local disk or NFS.

- A record is written to a temporary file in the same folder, flushed, and renamed over the old
  record. A rename is atomic, also on NFS: a reader needs no lock and never sees a partial record.
  After :meth:`FileStore.put` returns, the record survives a crash.
- The lock (``flock``, which Linux forwards to an NFS server) does not protect writes. It prevents a
  reader that renames a damaged file from renaming a new record instead. Without working locks,
  records are still written, but damaged files stay in place.
- A temporary file has a random name and one writer. If its writer was killed, a later writer
  removes the file after one hour, which is more than the clock difference between hosts.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from triton_dist._tuning.store.disk import make_folder, names_in
from triton_dist._tuning.store.layout import record_text
from triton_dist._tuning.store.readonly import ReadOnlyStore, read
from triton_dist._tuning.values import TuningRecord
from triton_dist.errors import NewerSchema

_LOCK_SECONDS = 10.0
_STALE_SECONDS = 3600.0


class FileStore(ReadOnlyStore):
    """Records under ``root``, which is created at the first write.

    No operation raises. If a file operation fails, warn; the lookup misses, or the record stays in
    memory.
    """

    def put(self, record: TuningRecord) -> str:
        path = self.path(record.key)
        try:
            text = record_text(record)
            make_folder(path.parent)
            temporary = path.with_name(f".{path.stem}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
            try:
                with open(temporary, "x", encoding="ascii") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                with _locked(path.parent):
                    os.replace(temporary, path)
                    _remove_stale(path.parent)
            finally:
                with suppress(OSError):
                    temporary.unlink()
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)  # the rename itself
            finally:
                os.close(folder)
        except OSError as error:
            self._report_refusal("write", path, f"cannot be written ({error}); it stays in memory")
            return ""
        return str(path)

    def _damaged(self, path: Path, reason: str) -> None:
        """Rename the damaged file, to warn about it only once and keep it for inspection."""
        renamed = path.with_name(path.name + ".damaged")
        kept = "It stays, because the folder cannot be locked: delete it"
        try:
            with _locked(path.parent) as locked:
                if locked and _is_damaged(path):
                    os.replace(path, renamed)
                if locked:
                    kept = f"It is now {renamed.name}, which you may delete"
        except OSError as error:
            kept = f"It stays ({error}): delete it"
        self._warn(path, f"is not used: {reason}. {kept}; its key is tuned again")

    def _report_refusal(self, operation: str, path: Path, what: str) -> None:
        folder = self.root.parent
        if os.path.isfile(folder):
            what += f". Set TRITON_DIST_CACHE_DIR to a folder: {folder} is a file"
        super()._report_refusal(operation, path, what)


def _is_damaged(path: Path) -> bool:
    """Return whether the file is damaged, checked again under the lock.

    A record under the file name of another key also counts as damaged.
    """
    try:
        key = read(path).key
    except (FileNotFoundError, NewerSchema):
        return False
    except ValueError:
        return True
    return path.stem.partition("-")[0] not in (key.digest, key.schema_1_digest)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Context manager that holds the lock of ``folder``; yields whether locking succeeded."""
    lock = FileLock(folder / ".lock", timeout=_LOCK_SECONDS)
    try:
        lock.acquire(poll_interval=0.01)
    except (OSError, NotImplementedError):  # a time-out is an OSError
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _remove_stale(folder: Path) -> None:
    """Remove temporary files left by killed writers."""
    for name in names_in(folder):
        if not (name.startswith(".") and name.endswith(".tmp")):
            continue
        temporary = folder / name
        with suppress(OSError):  # another writer may have removed it
            if time.time() - temporary.stat().st_mtime > _STALE_SECONDS:
                temporary.unlink()
