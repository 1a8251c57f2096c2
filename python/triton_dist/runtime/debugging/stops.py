"""Ranks that stand in pdb, and time limits that wait for them meanwhile.

A rank that stops offers a socket in the job's folder, and a file from which the others know that it
stands. What has a limit asks, once the limit is over, for how long some rank has stood meanwhile:
``time.monotonic`` is one clock for all processes of a host.
"""

from __future__ import annotations

import os
import pdb
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from triton_dist import knobs
from triton_dist.runtime import waits
from triton_dist.runtime.debugging.job import job_folder, made_folder, runs
from triton_dist.runtime.debugging.site import kernel_frame

_active = False
_LOOK_SECONDS = 0.1
_looked = 0.0


def start() -> None:
    """Let ``dl.breakpoint`` stop this process, and waits in kernels where one is asked to."""
    global _active
    _active = True


def end() -> None:
    global _active
    _active = False


def is_active() -> bool:
    return _active


def socket_of(folder: Path, rank: int) -> Path:
    return folder / f"pdb-{rank}.sock"


def request_of(folder: Path, rank: int) -> Path:
    """A file that asks a rank to stop, in the wait that it stands in or the next one."""
    return folder / f"halt-{rank}"


def stop_if_wanted(frame: FrameType) -> None:
    """Stop at ``frame``; while candidates are tried, which a stop would time out, nothing stops."""
    if _active and waits.limit_seconds() is None:
        _stop(frame)


def stop_if_asked() -> None:
    """Stop the kernel that waits here if somebody attaches to this rank."""
    global _looked
    if not _active or time.monotonic() - _looked < _LOOK_SECONDS:
        return
    _looked = time.monotonic()
    request = request_of(job_folder(), knobs.rank.get())
    if request.exists():
        request.unlink(missing_ok=True)
        frame = kernel_frame()
        if frame is not None:
            stop_if_wanted(frame)


class RankPdb(pdb.Pdb):
    """pdb whose terminal is a connection. Closing that, or ``q``, goes on as ``c`` does, and
    forgets breakpoints."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._connection = connection
        self._connection_is_closed = False
        self._files: list[Any] = [connection.makefile("r"), connection.makefile("w")]
        super().__init__(stdin=self._files[0], stdout=self._files[1], nosigint=True, readrc=False)
        self.prompt = f"(rank {rank}) "

    def stop_at(self, frame: FrameType) -> None:
        """Talk about ``frame`` now; what is said then, such as ``n``, holds from there on."""
        self.reset()
        each: FrameType | None = frame
        while each is not None:
            each.f_trace, self.botframe = self.trace_dispatch, each
            each = each.f_back
        self.interaction(frame, None)
        if not self._connection_is_closed:
            sys.settrace(self.trace_dispatch)  # last: nothing of ours is to be stepped through

    def interaction(self, *args: Any, **named: Any) -> None:
        with standing():
            super().interaction(*args, **named)

    def do_continue(self, arg: str) -> Any:
        result = super().do_continue(arg)
        if not self.breaks:
            self._leave()
        return result

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> Any:
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_q = do_exit = do_EOF = do_quit

    def _leave(self) -> None:
        self._connection_is_closed = True
        for each in (*reversed(self._files), self._connection):
            with suppress(OSError):  # the other end may be gone
                each.close()


def _stop(frame: FrameType) -> None:
    rank, folder = knobs.rank.get(), made_folder()
    path = socket_of(folder, rank)
    path.unlink(missing_ok=True)
    with standing(), socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        print(
            f"triton_dist: rank {rank} stands at {place}: triton-dist debug attach {rank}",
            file=sys.stderr,
            flush=True,
        )
        try:
            connection, _ = server.accept()
        finally:
            path.unlink(missing_ok=True)
    RankPdb(rank, connection).stop_at(frame)


@contextmanager
def standing() -> Iterator[None]:
    """Within, this rank stands: the limits of all ranks of the job on this host wait."""
    folder, begin = made_folder(), time.monotonic()
    note = folder / f"stands-{os.getpid()}-{threading.get_ident()}"
    note.write_text(repr(begin))
    try:
        yield
    finally:
        with (folder / "stood").open("a") as file:  # before the note goes: at no time neither
            file.write(f"{begin!r} {time.monotonic()!r}\n")
        note.unlink(missing_ok=True)


def seconds_stood(since: float) -> float:
    """Time since ``since`` for which some rank of the job stood."""
    folder, now = job_folder(), time.monotonic()
    spans: list[tuple[float, float]] = []
    with suppress(OSError):
        for note in folder.glob("stands-*"):
            with suppress(OSError, ValueError):  # gone, or not written, meanwhile
                if runs(int(note.name.split("-")[1])):
                    spans.append((float(note.read_text()), now))
        for line in (folder / "stood").read_text().splitlines():
            first, _, last = line.partition(" ")
            spans.append((float(first), float(last)))
    total, reached = 0.0, since
    for begin, end in sorted(spans):
        total += max(0.0, min(end, now) - max(begin, reached))
        reached = max(reached, end)
    return total


def is_overdue(deadline: float, limit: float) -> bool:
    """True once a limit of ``limit`` seconds that ends at ``deadline`` is over."""
    now = time.monotonic()
    return now > deadline and now > deadline + seconds_stood(deadline - limit)
