"""Write the logs of a tuning next to its record: JSON events for programs, text for users."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from triton_dist._tuning.store.disk import expanded, make_folder, open_regular
from triton_dist._tuning.store.journal import lines_of
from triton_dist._warn import print_line, warn
from triton_dist.errors import TuningWarning

_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_TAIL_BYTES = 1 << 14
_steps = logging.getLogger("triton_dist.contextual")


class _Lines:
    """A text file to append to, created at the first line.

    After the first error, call ``on_error`` with it and write nothing more.
    """

    def __init__(
        self, path: Path, on_error: Callable[[OSError], object] = lambda error: None
    ) -> None:
        self._path, self._on_error = path, on_error
        self._file: IO[str] | None = None
        self._is_open = True

    def add(self, line: str) -> None:
        if not self._is_open:
            return
        try:
            if self._file is None:
                make_folder(self._path.parent)
                # Each line is one write to a file opened for appending: lines stay whole.
                self._file = open(  # noqa: SIM115
                    open_regular(self._path, _APPEND),
                    "a",
                    buffering=1,
                    encoding="utf-8",
                    errors="backslashreplace",  # file names may contain undecodable bytes
                )
            self._file.write(f"{line}\n")
        except OSError as error:
            self._is_open = False
            self.close()
            self._on_error(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # flushing the rest of a failed line fails again
                file.close()


class FileLog:
    """Logs of the tunings that lead to the record at path ``record``.

    ``<record>.log.jsonl`` has the events of the leader, ``<record>.rank-<r>.log`` the lines of rank
    r. Later tunings of the key append to the files. Errors are ignored: the record is written to
    the same folder, and its error is reported.
    """

    def __init__(self, record: Path, rank: int) -> None:
        self._events = _Lines(record.with_suffix(".log.jsonl"))
        self._lines = _Lines(record.with_suffix(f".rank-{rank}.log"))

    def event(self, name: str, **facts: Any) -> None:
        """Append an event as one line of JSON."""
        self._events.add(json.dumps({"event": name, "time": _now(), **facts}, default=str))

    def line(self, text: str) -> None:
        """Append a line of text that describes the current step of this rank."""
        self._lines.add(f"{_now()} {text}".replace("\n", "\n    "))

    def close(self) -> None:
        self._events.close()
        self._lines.close()


def tunings_in_log(record: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each finished tuning in the log of ``record``, oldest first."""
    events: list[dict[str, Any]] = []
    found = []
    for event in lines_of(record.with_suffix(".log.jsonl")):
        if event.get("event") == "begin":
            events = []
        events.append(event)
        if event.get("event") == "winner":
            found.append(events)
            events = []
    return found


def last_line_by_rank(record: Path) -> dict[int, tuple[str, str]]:
    """Return the last line in the log of each rank: the time and the text."""
    found: dict[int, tuple[str, str]] = {}
    for path in record.parent.glob(f"{record.stem}.rank-*.log"):
        with suppress(OSError, ValueError), open(open_regular(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            last = next((line for line in lines[:0:-1] or lines if line[:1].isdigit()), "")
            when, _, text = last.partition(" ")
            found[int(path.suffixes[-2].removeprefix(".rank-"))] = when, text
    return dict(sorted(found.items()))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class StepLog:
    """Log of the steps of a rank in contextual tunings.

    No method raises. If the file cannot be written, warn once.

    Args:
        path: file to append to.
        prints: ``say`` also prints to standard error.
    """

    def __init__(self, path: Path, prints: bool) -> None:
        self._lines, self._prints = _Lines(expanded(path), self._warn_unwritable), prints
        self._path = path

    def line(self, text: str) -> None:
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        self._lines.add(f"{now} {text}")

    def say(self, text: str) -> None:
        self.line(text)
        with suppress(OSError, ValueError):  # the stream of a user's handler may be closed
            _steps.info("%s", text)
        if self._prints:
            print_line(f"contextual_autotune: {text}")

    def close(self) -> None:
        self._lines.close()

    def _warn_unwritable(self, error: OSError) -> None:
        warn(
            f"{self._path} cannot be written ({error}); set TRITON_DIST_AUTOTUNE_LOG_DIR to "
            "another folder",
            TuningWarning,
        )
