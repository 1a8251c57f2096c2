"""Journal the progress of a tuning as lines of JSON, to resume it after an interruption.

    {"head": {...}, "module": "ops"}                   key, candidates and policy of the tuning
    {"trying": "91c2..."}                              a config that is about to run
    {"spared": "91c2..."}                              its run ended by an exception, not a crash
    {"n": 0, "config": "91c2...", "asked": 10, ...}    samples requested of a config, and outcome
    {"stuck": "04d1...", "head": "...", "failure": {}} a quarantined (excluded) config
    {"finished": "77ab..."}                            digest of the record that will be written

Configs are named by their digests. The file is next to the record. A tuning
that is not resumed empties the file. Otherwise lines are only appended, each with one write. The
leader (rank 0 of the group) locks the file while it tunes. When a config hangs,
any rank may append a quarantined config without the lock. A line that a crash cut off is not valid
JSON and is skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from triton_dist._tuning.store.disk import make_folder, open_regular, read_bytes
from triton_dist._tuning.values import Failure, JournalEntry, codec
from triton_dist._tuning.values.outcome import UNREADABLE, outcome_tree, read_outcome

_MAX_CRASHES = 2
"""A config is quarantined after this number of program starts have crashed in it."""


_journals: weakref.WeakSet[FileJournal] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close all journals in a forked child, which would otherwise hold their locks after the end of
    its parent."""
    for journal in list(_journals):
        journal.close_without_flush()


os.register_at_fork(after_in_child=_close_inherited)


class FileJournal:
    """The journal of one key, at ``path``. No method raises if a file operation fails."""

    def __init__(self, path: Path, module: str = "") -> None:
        self.path, self._module = path, module
        self._file: int | None = None
        """Descriptor of the locked file; ``None`` if this process does not lead a tuning."""
        self._sync_thread: ThreadPoolExecutor | None = None
        self._pending_sync: Future[None] | None = None
        _journals.add(self)

    def quarantined(self, header: codec.Tree) -> Mapping[str, Failure]:
        digest, stuck = codec.digest(header), self._crashing_configs(header)
        for line in self._lines():
            if line.get("head") == digest and "stuck" in line:
                with suppress(*UNREADABLE):
                    outcome = read_outcome(line)
                    if isinstance(outcome, Failure):
                        stuck[str(line["stuck"])] = outcome
        return stuck

    def quarantine(self, header: codec.Tree, config: str, failure: Failure) -> bool:
        line = _quarantine_line(header, config, failure)
        try:
            make_folder(self.path.parent)
            file = open_regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            try:
                _write(file, line)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError:
            return False
        return True

    def begin(self, header: codec.Tree, record: str | None) -> Sequence[JournalEntry]:
        """Lock the journal, and return the entries to resume from.

        If another job is tuning the key, this job tunes without a journal.
        """
        try:
            make_folder(self.path.parent)
            file = open_regular(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError:
            return []
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = self._entries_to_resume(header, record)
            if entries is None:
                stuck = self.quarantined(header)
                os.ftruncate(file, 0)
                _write(file, {"head": header, "module": self._module})
                for config, failure in stuck.items():
                    _write(file, _quarantine_line(header, config, failure))
                os.fsync(file)
        except OSError:
            os.close(file)
            return []
        self._file = file
        return entries or []

    def trying(self, config: str) -> None:
        self._append_line({"trying": config})

    def ended_by_exception(self, config: str) -> None:
        self._append_line({"spared": config})

    def append(self, entry: JournalEntry) -> None:
        """Append an outcome.

        After the call, the outcome survives a crash of the process. It survives a crash of the host
        after an ``fsync`` in a second thread, for which measurements do not wait.
        """
        self._append_line(entry.to_tree())
        if self._file is not None and (self._pending_sync is None or self._pending_sync.done()):
            self._sync_thread = self._sync_thread or ThreadPoolExecutor(1, "triton_dist-journal")
            self._pending_sync = self._sync_thread.submit(os.fsync, self._file)

    def finish(self, record: str) -> None:
        self._append_line({"finished": record})
        self._sync()

    def remove(self) -> None:
        """Remove the journal file if this rank leads, or if no leader has written to the file.

        If ranks have separate cache folders, no leader writes to this rank's file. In a shared
        folder, other ranks keep the file, because the leader may not have written the record yet.
        """
        first = next(self._lines(), {})
        if self._file is not None or not isinstance(first.get("head"), dict):
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Flush and unlock the journal, so that another process can resume the tuning."""
        if self._file is not None:
            self._sync()
            os.close(self._file)
            self._file = None

    def close_without_flush(self) -> None:
        """Close the journal without flushing, in a process that does not lead the tuning."""
        if self._file is not None:
            os.close(self._file)
        self._file = self._sync_thread = self._pending_sync = None

    def _append_line(self, line: codec.Tree) -> None:
        if self._file is None:
            return
        try:
            _write(self._file, line)
        except OSError:  # no later line may be written, because this line is missing
            self.close()

    def _sync(self) -> None:
        if self._sync_thread is not None:
            self._sync_thread.shutdown()
            self._sync_thread = self._pending_sync = None
        if self._file is not None:
            with suppress(OSError):
                os.fsync(self._file)

    def _crashing_configs(self, header: codec.Tree) -> dict[str, Failure]:
        """Return the configs in which at least two program starts crashed. A single crash may have
        another cause."""
        lines, times = self._lines(), dict[str, int]()
        if next(lines, {}).get("head") != header:
            return {}
        for line in lines:
            if "trying" in line:
                config = str(line["trying"])
                times[config] = times.get(config, 0) + 1
            else:
                times.pop(str(line.get("config", line.get("spared"))), None)
        reason = "{} starts ended without an error while they tried it"
        return {
            config: Failure("crashed", reason.format(ended))
            for config, ended in times.items()
            if ended >= _MAX_CRASHES
        }

    def _entries_to_resume(
        self, header: codec.Tree, record: str | None
    ) -> list[JournalEntry] | None:
        """Return the entries to resume from; ``None`` if there is nothing to resume.

        There is nothing to resume if the journal has another head, or if its tuning finished with
        the record whose digest is ``record``.
        """
        lines = self._lines()
        if next(lines, {}).get("head") != header:
            return None
        entries: list[JournalEntry] = []
        for line in lines:
            if record is not None and line.get("finished") == record:
                return None
            with suppress(*UNREADABLE):
                entry = JournalEntry.from_tree(line)
                if entry.index <= len(entries):
                    # A repeated index replaces its entry and all later entries.
                    entries[entry.index :] = [entry]
        return entries

    def _lines(self) -> Iterator[dict[str, Any]]:
        return lines_of(self.path)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the lines of a file. Yield nothing if the file cannot be read."""
    try:
        text = read_bytes(path).decode("utf-8", "replace")
    except OSError:
        return
    for line in text.splitlines():
        with suppress(ValueError):
            tree = codec.loads(line)
            if isinstance(tree, dict):
                yield tree


def _quarantine_line(header: codec.Tree, config: str, failure: Failure) -> codec.Tree:
    return {"stuck": config, "head": codec.digest(header), **outcome_tree(failure)}


def _write(file: int, line: codec.Tree) -> None:
    """Append one line, after a line feed, because the previous line may be cut off."""
    data = b"\n" + json.dumps(line, allow_nan=False).encode() + b"\n"
    if os.write(file, data) != len(data):
        raise OSError(f"fewer than {len(data)} bytes were written")
