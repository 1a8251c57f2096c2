"""Store records in files, in a folder that several jobs and hosts may write at the same time.

The folder may be on a local disk or NFS.

- A record is written to a temporary file in the same folder, flushed, and renamed over the old
  record. A rename is atomic, also on NFS, so a reader needs no lock and never reads a partial
  record. After :meth:`FileStore.put` returns, the record survives a crash of the host.
- A reader renames a damaged file. The lock of the folder prevents the reader from renaming a new
  record that a writer has just moved there. The lock is a ``flock``, which Linux forwards to an
  NFS server. If it does not work, records are written nevertheless, and damaged files stay.
- A temporary file has a random name and one writer. If its writer was killed, a later writer
  removes the file when it is one hour old. Clocks of hosts differ by less than an hour.
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

_LOCK_TIMEOUT_SECONDS = 10.0
_STALE_AGE_SECONDS = 3600.0


class FileStore(ReadOnlyStore):
    """Records under ``root``, which is created at the first write.

    No method raises. If a file operation fails, the store warns. A look-up then finds nothing, and
    a record to write stays in memory only.
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
                os.fsync(folder)  # make the rename survive a crash
            finally:
                os.close(folder)
        except OSError as error:
            self._report_io_error("write", path, f"cannot be written ({error}); it stays in memory")
            return ""
        return str(path)

    def _report_damaged(self, path: Path, reason: str) -> None:
        """Warn about the damaged file, and rename it to keep it for inspection."""
        renamed = path.with_name(path.name + ".damaged")
        advice = "It stays, because the folder cannot be locked: delete it"
        try:
            with _locked(path.parent) as is_locked:
                if is_locked and _is_damaged(path):
                    os.replace(path, renamed)
                if is_locked:
                    advice = f"It is now {renamed.name}, which you may delete"
        except OSError as error:
            advice = f"It stays ({error}): delete it"
        self._warn(path, f"is not used: {reason}. {advice}; its key is tuned again")

    def _report_io_error(self, operation: str, path: Path, what: str) -> None:
        folder = self.root.parent
        if os.path.isfile(folder):
            what += f". Set TRITON_DIST_CACHE_DIR to a folder: {folder} is a file"
        super()._report_io_error(operation, path, what)


def _is_damaged(path: Path) -> bool:
    """Return whether ``path`` is damaged or named for another key. The caller holds the folder's
    lock."""
    try:
        key = read(path).key
    except (FileNotFoundError, NewerSchema):
        return False
    except ValueError:
        return True
    return path.stem.partition("-")[0] not in (key.digest, key.schema_1_digest)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Context manager that holds the lock of ``folder``. It yields whether locking succeeded."""
    lock = FileLock(folder / ".lock", timeout=_LOCK_TIMEOUT_SECONDS)
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
    """Remove temporary files of killed writers that are older than one hour."""
    for name in names_in(folder):
        if not (name.startswith(".") and name.endswith(".tmp")):
            continue
        temporary = folder / name
        with suppress(OSError):  # another writer may have removed it
            if time.time() - temporary.stat().st_mtime > _STALE_AGE_SECONDS:
                temporary.unlink()
