"""Files beside records: interrupted tunings, and logs; for commands that clean up."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from triton_dist._tuning.store.disk import names_in, open_regular
from triton_dist._tuning.store.journal import lines_of
from triton_dist._tuning.values import Key
from triton_dist._tuning.values.outcome import UNREADABLE


class Interrupted(NamedTuple):
    """A tuning that was begun, and may be going on."""

    path: Path
    """Path of its journal."""
    key: Key | None
    """``None``: the journal does not say."""
    tried: int
    """Configs that an outcome is known of."""


def interrupted(root: Path) -> Iterator[Interrupted]:
    """The journals in the folders of ``root``. What cannot be read is left out."""
    for folder in _names_in(root):
        for name in _names_in(root / folder):
            if name.endswith(".journal"):
                yield _read(root / folder / name)


def places(root: Path) -> set[Path]:
    """Arguments for :func:`remove_tuning`: all that lies in the folders of ``root``."""
    return {
        root / folder / name.partition(".")[0]
        for folder in _names_in(root)
        for name in _names_in(root / folder)
        if not name.startswith(".")
    }


def is_held(journal: Path) -> bool:
    """True if a tuning that writes it is going on."""
    with suppress(OSError):
        file = open_regular(journal, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def remove_tuning(place: Path) -> set[Path]:
    """Remove a record with its journal and logs, ``<place>.json`` and so on; those of a tuning that
    is going on stay. Returns what was removed.

    Raises:
        OSError: the folder cannot be written.
    """
    record = place.with_name(f"{place.name}.json")
    removed = set()
    stays = is_held(place.with_name(f"{place.name}.journal"))
    for name in names_in(place.parent):
        path = place.parent / name
        if name.startswith(f"{place.name}.") and (path == record or not stays):
            path.unlink(missing_ok=True)
            removed.add(path)
    return removed


def _read(path: Path) -> Interrupted:
    key: Key | None = None
    tried: set[object] = set()
    for line in lines_of(path):
        head = line.get("head")
        if isinstance(head, dict):
            with suppress(*UNREADABLE):
                function, text, hardware = (
                    str(head[name]) for name in ("function", "key", "hardware_group")
                )
                found = Key(function, text, hardware, str(line.get("module", "")))
                str(found)  # a text that is none is no key
                key = found
        if "n" in line:
            tried.add(line.get("config"))
    return Interrupted(path, key, len(tried))


def _names_in(folder: Path) -> list[str]:
    try:
        return names_in(folder)
    except OSError:  # a file beside the folders; or it is closed, which the store says
        return []
