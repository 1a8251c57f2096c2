"""Find the journals and logs next to records, for commands that list and remove them."""

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
from triton_dist._tuning.store.layout import is_ours
from triton_dist._tuning.values import JournalEntry, Key, Measurement
from triton_dist._tuning.values.outcome import UNREADABLE


class Interrupted(NamedTuple):
    """A tuning with a journal: it was interrupted or is running."""

    path: Path
    """Path of the journal."""
    key: Key | None
    """``None`` if the journal has no readable key."""
    tried: int
    """Number of configs with an outcome."""
    candidates: int = 0
    """Number of configs to try."""
    best: float | None = None
    """Lowest median so far, in milliseconds."""
    seconds: float = 0.0
    """Tuning time so far, in seconds."""
    stuck: int = 0
    """Number of quarantined configs, in which a process did not return."""


def interrupted(root: Path) -> Iterator[Interrupted]:
    """Yield the tunings with journals in the folders of ``root``; skip unreadable folders."""
    for folder in _names_in(root):
        for name in _names_in(root / folder):
            if name.endswith(".journal"):
                yield _read(root / folder / name)


def places(root: Path) -> set[Path]:
    """Return the places of our files in the folders of ``root``, for :func:`removable`.

    The place of a record, its log and its journal is their common path without extensions.
    """
    return {path.with_name(path.name.partition(".")[0]) for path in _files(root, ours=True)}


def foreign(root: Path) -> list[Path]:
    """Return the files that another program wrote to the folders of ``root``."""
    return list(_files(root, ours=False))


def _files(root: Path, ours: bool) -> Iterator[Path]:
    for folder in _names_in(root):
        for name in _names_in(root / folder):
            if is_ours(name) == ours and not name.startswith("."):
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


Kind = Literal["record", "journal", "log"]


def removable(places: Collection[Path]) -> dict[Path, Kind]:
    """Return the removable files of records, with their kinds.

    For each place, these are the record ``<place>.json``, its journal and its logs. While a tuning
    is running, only the record is removable.

    Raises:
        OSError: a folder cannot be read.
    """
    stems: dict[Path, set[str]] = {}
    for place in places:
        stems.setdefault(place.parent, set()).add(place.name)
    found: dict[Path, Kind] = {}
    for folder, wanted in sorted(stems.items()):
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
                found[folder / name] = kind
    return found


_KINDS: dict[str, Kind] = {".json": "record", ".journal": "journal"}


def _read(path: Path) -> Interrupted:
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
                found = Key(function, text, hardware, str(line.get("module", "")))
                str(found)  # raises if the key is malformed
                key = found
            with suppress(*UNREADABLE):
                named = head["candidates"]
                candidates = int(named["number"]) if isinstance(named, dict) else len(named)
        elif "stuck" in line:
            stuck.add(line["stuck"])
        elif "n" in line:
            tried.add(line.get("config"))
            with suppress(*UNREADABLE):
                entry = JournalEntry.from_tree(line)
                seconds = entry.seconds
                if isinstance(entry.outcome, Measurement):
                    best = min(entry.outcome.median, math.inf if best is None else best)
    return Interrupted(path, key, len(tried), candidates, best, seconds, len(stuck))


def _names_in(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except OSError:  # not a folder, or not readable: the store warns
        return []
