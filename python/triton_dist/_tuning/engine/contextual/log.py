"""What each rank did, step by step, for a person to read: ``rank-<i>.log``."""

from __future__ import annotations

import datetime
import logging
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from triton_dist._tuning.engine.contextual.context import Context, shown
from triton_dist._tuning.engine.contextual.turn import Stepped
from triton_dist._tuning.values import Measurement
from triton_dist._warn import warn
from triton_dist.errors import TuningWarning

_logger = logging.getLogger("triton_dist.contextual")


class StepLog:
    """Appends to ``path``; folder and file are made at the first line. Never fails: what the disk
    refuses is a warning, once.

    Args:
        prints: whether ``say`` also prints, to standard error.
    """

    def __init__(self, path: Path, prints: bool) -> None:
        self._path, self._prints = path, prints
        self._file: TextIO | None = None
        self._refused = False

    def line(self, text: str) -> None:
        if self._refused:
            return
        now = datetime.datetime.now().isoformat(sep=" ", timespec="milliseconds")
        try:
            if self._file is None:
                self._file = _opened(self._path.expanduser())
            self._file.write(f"{now} {text}\n")
        except (OSError, ValueError, RuntimeError) as error:  # the last two: no such path can be
            self._refused = True
            warn(
                f"{self._path} cannot be written ({error}); TRITON_DIST_AUTOTUNE_LOG_DIR sets "
                "another folder",
                TuningWarning,
            )

    def say(self, text: str) -> None:
        self.line(text)
        _logger.info("%s", text)
        if self._prints:
            print(f"contextual_autotune: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(path: Path) -> TextIO:
    """For lines at the end, each of which can be read after a crash. A pipe, at whose other end
    nobody may be, is refused."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file")
    return open(path, "a", encoding="utf-8", errors="backslashreplace", buffering=1)


def step_line(call: int, context: Context, stepped: Stepped) -> str:
    """What this rank did in one step."""
    took = f"{stepped.milliseconds:.4f} ms" if stepped.timed else "warm-up"
    failed = "; ".join(map(str, stepped.failures.values()))
    config = shown(context.live[stepped.digest])
    return f"call {call} {context.name} config {config} iter {stepped.iteration}: {failed or took}"


def summary(tuned: Sequence[Context], calls: int, seconds: float) -> str:
    """A table of what was chosen."""
    rows = [f"{calls} calls of the function, {seconds:.1f} s"]
    for context in tuned:
        best = context.record.best.outcome if context.record else None
        took = f"{best.median:10.4f} ms" if isinstance(best, Measurement) else ""
        of = f"{len(context.candidates):3} configs"
        rows.append(f"  {took}  {of}  {context.name}  {shown(context.winner)}")
    return "\n".join(rows)
