"""The user's own records, in a folder that any number of jobs and hosts may share.

What holds on a local disk and on NFS, and why:

- A record is written to a temporary file in the same folder, flushed to the disk, and renamed over
  the old one. A rename is one step, on an NFS server too: a reader needs no lock, and sees a record
  whole or not at all. What :meth:`FileStore.put` returned from survives a crash.
- The lock (``flock``, which Linux's NFS carries to the server) is not what makes a write whole. It
  keeps a reader that sets a damaged file aside from taking away what a writer put there a moment
  ago. So where locks do not work, or their holder is stopped, records are still written; only
  damaged files stay where they are.
- A temporary file is its writer's alone (made anew, with a random name). That of a writer that was
  killed is removed by a later one when it is an hour old: hosts' clocks differ by less.
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
    """Records under ``root``, which is made when something is written. No operation raises: what
    the disk refuses is a miss or stays in memory, and a warning."""

    def put(self, record: TuningRecord) -> str:
        path = self.path(record.key)
        try:
            # In one step, and only by what has reached the disk.
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
            self._refuse("write", path, f"cannot be written ({error}); it stays in memory")
            return ""
        return str(path)

    def _damaged(self, path: Path, reason: str) -> None:
        """Rename the file, so that it is met once and can still be examined."""
        aside = path.with_name(path.name + ".damaged")
        kept = "It stays, because the folder cannot be locked: delete it"
        try:
            with _locked(path.parent) as locked:
                if locked and _is_damaged(path):
                    os.replace(path, aside)
                if locked:
                    kept = f"It is now {aside.name}, which you may delete"
        except OSError as error:
            kept = f"It stays ({error}): delete it"
        self._warn(path, f"is not used: {reason}. {kept}; its key is tuned again")

    def _refuse(self, use: str, path: Path, what: str) -> None:
        folder = self.root.parent
        if os.path.isfile(folder):
            what += f". Set TRITON_DIST_CACHE_DIR to a folder: {folder} is a file"
        super()._refuse(use, path, what)


def _is_damaged(path: Path) -> bool:
    """True if it still is, now that the lock is held. A whole record under another's name is
    too."""
    try:
        key = read(path).key
    except (FileNotFoundError, NewerSchema):
        return False
    except ValueError:
        return True
    return path.stem.partition("-")[0] not in (key.digest, key.schema_1_digest)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock; ``False`` where that cannot be had."""
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
    """Temporary files that killed writers left."""
    for name in names_in(folder):
        if not (name.startswith(".") and name.endswith(".tmp")):
            continue
        temporary = folder / name
        with suppress(OSError):  # another writer was faster
            if time.time() - temporary.stat().st_mtime > _STALE_SECONDS:
                temporary.unlink()
