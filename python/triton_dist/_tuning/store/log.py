"""What happened in a tuning, beside its record: events for programs, lines for people.

``<record>.log.jsonl`` has the leader's events, ``<record>.rank-<r>.log`` the lines of rank r. Later
tunings of the same key add to them.
"""

from __future__ import annotations

import datetime
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from triton_dist._tuning.store.disk import make_folder, open_regular

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class FileLog:
    """Logs of the record at ``record``. What the disk refuses is not logged: nothing raises.

    There is no warning either, since the record, which goes to the same folder, has one.
    """

    def __init__(self, record: Path, rank: int) -> None:
        self._events = record.with_suffix(".log.jsonl")
        self._lines = record.with_suffix(f".rank-{rank}.log")
        self._files: dict[Path, IO[str] | None] = {}

    def event(self, name: str, **facts: Any) -> None:
        """One line of JSON."""
        event = {"event": name, "time": _now(), **facts}
        self._add(self._events, json.dumps(event, default=str))

    def line(self, text: str) -> None:
        """For a person who looks for what this rank did last."""
        self._add(self._lines, f"{_now()} {text}")

    def close(self) -> None:
        for path in list(self._files):
            self._drop(path)
        self._files.clear()

    def _add(self, path: Path, text: str) -> None:
        try:
            if path not in self._files:
                self._files[path] = None  # until it is open: a refusal is not asked for again
                make_folder(path.parent)
                # Each line is one write to a file opened for appending: lines stay whole.
                self._files[path] = open(  # noqa: SIM115
                    open_regular(path, _APPEND),
                    "a",
                    buffering=1,
                    encoding="utf-8",
                    errors="backslashreplace",  # the name of a file may have bytes that are no text
                )
            file = self._files[path]
            if file is not None:
                file.write(text.replace("\n", "\n    ") + "\n")
        except OSError:
            self._drop(path)

    def _drop(self, path: Path) -> None:
        file, self._files[path] = self._files[path], None
        if file is not None:
            with suppress(OSError):  # what is left of a line that the disk refused
                file.close()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
