"""Deadlines that do not expire while a rank of the job is stopped in a debugger.

While a debugger stops a rank, the rank keeps a file in the job's folder. Deadlines are extended by
the time in which any rank was stopped. ``time.monotonic`` is one clock for all processes of a host.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from triton_dist.runtime.job import create_job_folder, is_running, job_folder


@contextmanager
def paused() -> Iterator[None]:
    """Context manager that pauses the deadlines of all ranks of the job on this host."""
    folder, begin = create_job_folder(), time.monotonic()
    stopped_file = folder / f"stopped-{os.getpid()}-{threading.get_ident()}"
    stopped_file.write_text(repr(begin))
    try:
        yield
    finally:
        # Written before the other file is removed: a reader finds the pause in one of the files.
        with (folder / "pauses").open("a") as file:
            file.write(f"{begin!r} {time.monotonic()!r}\n")
        stopped_file.unlink(missing_ok=True)


def is_overdue(deadline: float, limit_seconds: float) -> bool:
    """Return whether ``deadline``, a time of ``time.monotonic``, has passed. Pauses in the
    ``limit_seconds`` before the deadline, and after it, extend the deadline."""
    now = time.monotonic()
    return now > deadline and now > deadline + _seconds_paused(deadline - limit_seconds)


def _seconds_paused(since: float) -> float:
    """Return for how many seconds since ``since`` at least one rank of the job was stopped."""
    folder, now = job_folder(), time.monotonic()
    pauses: list[tuple[float, float]] = []
    with suppress(OSError):
        for stopped_file in folder.glob("stopped-*"):
            with suppress(OSError, ValueError):  # removed, or not yet written
                if is_running(int(stopped_file.name.split("-")[1])):
                    pauses.append((float(stopped_file.read_text()), now))
        for line in (folder / "pauses").read_text().splitlines():
            first, _, last = line.partition(" ")
            pauses.append((float(first), float(last)))
    total, counted_until = 0.0, since
    for begin, end in sorted(pauses):
        total += max(0.0, min(end, now) - max(begin, counted_until))
        counted_until = max(counted_until, end)
    return total
