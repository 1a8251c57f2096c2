"""Find records, journals and logs in a cache folder, for commands that list and remove them.

A journal is a file with the outcomes of an unfinished tuning.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from triton_dist._tuning.store.disk import names_in, open_regular
from triton_dist._tuning.store.journal import lines_of
from triton_dist._tuning.store.layout import is_tuner_file
from triton_dist._tuning.values import JournalEntry, Key, Measurement
from triton_dist._tuning.values.outcome import UNREADABLE


class InterruptedTuning(NamedTuple):
    """A tuning that has a journal, so it was interrupted or is running."""

    path: Path
    key: Key | None
    """``None`` if the journal has no readable key."""
    num_tried: int
    """Number of configs with an outcome."""
    num_candidates: int = 0
    best_ms: float | None = None
    """Lowest median so far, in milliseconds."""
    seconds: float = 0.0
    """Tuning time so far, in seconds."""
    num_quarantined: int = 0
    """Number of configs that are excluded because a process hung or crashed in them."""


def interrupted_tunings(root: Path) -> Iterator[InterruptedTuning]:
    """Yield the tunings with journals in the folders of ``root``. Skip unreadable folders."""
    for folder in _names_in(root):
        for name in _names_in(root / folder):
            if name.endswith(".journal"):
                yield _read_journal(root / folder / name)


def record_stems(root: Path) -> set[Path]:
    """Return the paths, without extensions, of our files in the folders of ``root``.

    A record, its logs and its journal differ only in their extensions. Pass the result to
    :func:`removable_files`.
    """
    return {
        path.with_name(path.name.partition(".")[0]) for path in _files(root, written_by_tuner=True)
    }


def foreign_files(root: Path) -> list[Path]:
    """Return the files that another program wrote to the folders of ``root``."""
    return list(_files(root, written_by_tuner=False))


def _files(root: Path, written_by_tuner: bool) -> Iterator[Path]:
    for folder in _names_in(root):
        for name in _names_in(root / folder):
            if is_tuner_file(name) == written_by_tuner and not name.startswith("."):
                yield root / folder / name


def is_in_use(journal: Path) -> bool:
    """Return whether a running tuning holds the lock of ``journal``."""
    with suppress(OSError):
        file = open_regular(journal, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


FileKind = Literal["record", "journal", "log"]


def removable_files(stems: Collection[Path]) -> dict[Path, FileKind]:
    """Return the records, journals and logs that may be removed, with their kinds.

    ``stems`` are paths of records without extensions (:func:`record_stems`). The journal and the
    logs of a running tuning are left out.

    Raises:
        OSError: a folder cannot be read.
    """
    stems_by_folder: dict[Path, set[str]] = {}
    for each in stems:
        stems_by_folder.setdefault(each.parent, set()).add(each.name)
    removable: dict[Path, FileKind] = {}
    for folder, wanted in sorted(stems_by_folder.items()):
        names = names_in(folder)
        journals = {name for name in names if name.endswith(".journal")}
        open_journals = {name for name in journals if is_in_use(folder / name)}
        for name in names:
            ends = (index for index, letter in enumerate(name) if letter == ".")
            stem = next((name[:end] for end in ends if name[:end] in wanted), None)
            if stem is None:
                continue
            kind = _KINDS.get(name.removeprefix(stem), "log")
            if kind == "record" or f"{stem}.journal" not in open_journals:
                removable[folder / name] = kind
    return removable


_KINDS: dict[str, FileKind] = {".json": "record", ".journal": "journal"}


def _read_journal(path: Path) -> InterruptedTuning:
    """Read a journal. ``head`` is the tuning's header, ``n`` the number of a request with its
    outcome, and ``stuck`` the digest of a config that is excluded."""
    key: Key | None = None
    tried: set[object] = set()
    stuck: set[object] = set()
    candidates, best, seconds = 0, None, 0.0
    for line in lines_of(path):
        head = line.get("head")
        if isinstance(head, dict):
            with suppress(*UNREADABLE):
                function, text, hardware = (
                    str(head[name]) for name in ("function", "key", "hardware_group")
                )
                read_key = Key(function, text, hardware, str(line.get("module", "")))
                str(read_key)  # raises if the key is malformed
                key = read_key
            with suppress(*UNREADABLE):
                each = head["candidates"]
                candidates = int(each["number"]) if isinstance(each, dict) else len(each)
        elif "stuck" in line:
            stuck.add(line["stuck"])
        elif "n" in line:
            tried.add(line.get("config"))
            with suppress(*UNREADABLE):
                entry = JournalEntry.from_tree(line)
                seconds = entry.seconds
                if isinstance(entry.outcome, Measurement):
                    best = min(entry.outcome.median, math.inf if best is None else best)
    return InterruptedTuning(path, key, len(tried), candidates, best, seconds, len(stuck))


def _names_in(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except OSError:  # not a folder, or not readable; reading its records warns about it
        return []
