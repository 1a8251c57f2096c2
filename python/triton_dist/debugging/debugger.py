"""Stop a rank in pdb, at ``dl.breakpoint`` or in a waiting kernel.

A stopped rank listens on a socket in the job's folder, to which ``triton-dist debug attach``
connects. While a rank is stopped, the deadlines of all ranks of the job are paused.
"""

from __future__ import annotations

import pdb
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from triton_dist import knobs
from triton_dist.debugging.kernel_location import kernel_frame
from triton_dist.runtime import deadlines, waits
from triton_dist.runtime.job import create_job_folder, job_folder

_active = False
_POLL_SECONDS = 0.1
_last_check = 0.0  # time at which the request file was last looked for


def start() -> None:
    global _active
    _active = True


def end() -> None:
    global _active
    _active = False


def is_active() -> bool:
    return _active


def socket_path(folder: Path, rank: int) -> Path:
    return folder / f"pdb-{rank}.sock"


def stop_request_path(folder: Path, rank: int) -> Path:
    """Return the path of the file that requests ``rank`` to stop when it waits in a kernel."""
    return folder / f"halt-{rank}"


def stop_at_breakpoint(frame: FrameType) -> None:
    """Stop at ``frame`` until a client connects, and start pdb. Do nothing during a tuning: a stop
    would exceed the limits for waits in kernels, and the candidate would fail."""
    if _active and not waits.are_limited():
        rank, folder = knobs.rank.get(), create_job_folder()
        path = socket_path(folder, rank)
        path.unlink(missing_ok=True)
        with deadlines.paused(), socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(1)
            location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            print(
                f"triton_dist: rank {rank} is stopped at {location}: "
                f"triton-dist debug attach {rank}",
                file=sys.stderr,
                flush=True,
            )
            try:
                connection, _ = server.accept()
            finally:
                path.unlink(missing_ok=True)
        RankPdb(rank, connection).stop_at(frame)


def stop_if_requested() -> None:
    """Stop if ``triton-dist debug attach`` has requested a stop of this rank. Interpreted kernels
    call this while they wait for a flag."""
    global _last_check
    if not _active or time.monotonic() - _last_check < _POLL_SECONDS:
        return
    _last_check = time.monotonic()
    request = stop_request_path(job_folder(), knobs.rank.get())
    if request.exists():
        request.unlink(missing_ok=True)
        frame = kernel_frame()
        if frame is not None:
            stop_at_breakpoint(frame)


class RankPdb(pdb.Pdb):
    """A pdb whose terminal is a socket. The command ``q``, or closing the socket, clears all
    breakpoints and continues the program."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self._connection = connection
        self._connection_is_closed = False
        self._files: list[Any] = [connection.makefile("r"), connection.makefile("w")]
        super().__init__(stdin=self._files[0], stdout=self._files[1], nosigint=True, readrc=False)
        self.prompt = f"(rank {rank}) "

    def stop_at(self, frame: FrameType) -> None:
        """Start the prompt at ``frame``. Commands such as ``n`` continue from this frame."""
        self.reset()
        each: FrameType | None = frame
        while each is not None:
            each.f_trace, self.botframe = self.trace_dispatch, each
            each = each.f_back
        self.interaction(frame, None)
        if not self._connection_is_closed:
            sys.settrace(self.trace_dispatch)  # last, so that pdb does not step through this code

    def interaction(self, *args: Any, **kwargs: Any) -> None:
        with deadlines.paused():
            super().interaction(*args, **kwargs)

    def do_continue(self, arg: str) -> Any:
        result = super().do_continue(arg)
        if not self.breaks:
            self._connection_is_closed = True
            for each in (*reversed(self._files), self._connection):
                with suppress(OSError):  # the client may have disconnected
                    each.close()
        return result

    do_c = do_cont = do_continue

    def do_quit(self, arg: str) -> Any:
        self.clear_all_breaks()
        return self.do_continue(arg)

    do_q = do_exit = do_EOF = do_quit
