"""Write and read the logs of tunings: JSON events for programs, and lines of text for users."""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from triton_dist._tuning.store.disk import expand_home, make_folder, open_regular
from triton_dist._tuning.store.journal import lines_of
from triton_dist._warn import print_line, warn
from triton_dist.errors import TuningWarning

_APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
_TAIL_BYTES = 1 << 14  # bytes at the end of a log in which the last line is searched
_step_logger = logging.getLogger("triton_dist.contextual")


class _LineFile:
    """Text file to append lines to. The file is created at the first line.

    After the first error, ``on_error`` is called with it, and nothing more is written.
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
                # Each line is one write to a file opened for appending, so lines of several
                # processes do not mix.
                self._file = open(  # noqa: SIM115
                    open_regular(self._path, _APPEND_FLAGS),
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
    """Logs of the tunings of one key, next to the file of its record.

    The file ``.log.jsonl`` has the events that rank 0 writes. The file ``.rank-<r>.log`` has the
    lines of rank r. Later tunings of the key append to the files. Errors are ignored, because
    writing the record to the same folder reports them.

    Args:
        record: path of the record's file; its suffix is replaced.
    """

    def __init__(self, record: Path, rank: int) -> None:
        self._events = _LineFile(record.with_suffix(".log.jsonl"))
        self._lines = _LineFile(record.with_suffix(f".rank-{rank}.log"))

    def event(self, name: str, **fields: Any) -> None:
        """Append an event as one line of JSON."""
        self._events.add(json.dumps({"event": name, "time": _now(), **fields}, default=str))

    def line(self, text: str) -> None:
        """Append a line of text that describes the current step of this rank."""
        self._lines.add(f"{_now()} {text}".replace("\n", "\n    "))

    def close(self) -> None:
        self._events.close()
        self._lines.close()


def finished_tunings_in_log(record: Path) -> list[list[dict[str, Any]]]:
    """Return the events of each finished tuning, oldest first, from the log of ``record``."""
    events: list[dict[str, Any]] = []
    tunings = []
    for event in lines_of(record.with_suffix(".log.jsonl")):
        if event.get("event") == "begin":
            events = []
        events.append(event)
        if event.get("event") == "winner":
            tunings.append(events)
            events = []
    return tunings


def last_line_by_rank(record: Path) -> dict[int, tuple[str, str]]:
    """Return, by rank, time and text of the last line in the rank's log."""
    last_lines: dict[int, tuple[str, str]] = {}
    for path in record.parent.glob(f"{record.stem}.rank-*.log"):
        with suppress(OSError, ValueError), open(open_regular(path, os.O_RDONLY), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
            last = next((line for line in lines[:0:-1] or lines if line[:1].isdigit()), "")
            when, _, text = last.partition(" ")
            last_lines[int(path.suffixes[-2].removeprefix(".rank-"))] = when, text
    return dict(sorted(last_lines.items()))


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class StepLog:
    """Log of one rank during ``contextual_autotune``.

    No method raises. If the file cannot be written, one warning is given.

    Args:
        path: file to append to.
        prints: :meth:`report` also prints to standard error.
    """

    def __init__(self, path: Path, prints: bool) -> None:
        self._lines, self._prints = _LineFile(expand_home(path), self._warn_unwritable), prints
        self._path = path

    def line(self, text: str) -> None:
        """Append a line to the file."""
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        self._lines.add(f"{now} {text}")

    def report(self, text: str) -> None:
        """Append a line to the file, and send it to the logger and, if enabled, to stderr."""
        self.line(text)
        with suppress(OSError, ValueError):  # the stream of a user's handler may be closed
            _step_logger.info("%s", text)
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
