"""Looks into a job that runs, for ``triton-dist debug``: pdb of a rank, and where all stand."""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_LOOK_SECONDS = 0.05


def attach(rank: int, job: str | None, seconds: float) -> int:
    """Talk with the pdb of a rank, from standard input to standard output; waits ``seconds`` for
    the rank to stop.

    Raises:
        NoSuchJob: there is no such job, or several.
        TimeoutError: the rank does not stop.
    """
    from triton_dist.debugging import debugger
    from triton_dist.debugging.faults import NoSuchJob
    from triton_dist.debugging.rank_status import folder_of

    end = time.monotonic() + seconds
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                try:
                    folder = folder_of(job, debugger.socket_of(Path(), rank).name)
                except NoSuchJob:  # none of which it stands
                    folder = folder_of(job, "*")
                    debugger.request_of(folder, rank).touch()
                connection.connect(str(debugger.socket_of(folder, rank)))
            except (NoSuchJob, OSError) as failure:
                if time.monotonic() < end:
                    time.sleep(_LOOK_SECONDS)
                    continue
                if isinstance(failure, NoSuchJob):
                    raise
                debugger.request_of(folder, rank).unlink(missing_ok=True)
                raise TimeoutError(
                    f"rank {rank} did not stop within {seconds:g} s: it has come to no "
                    "dl.breakpoint and stands in no dl.wait of an interpreted kernel"
                ) from failure
            debugger.request_of(folder, rank).unlink(missing_ok=True)
            _talk(connection, sys.stdin.buffer, sys.stdout.buffer)
            return 0


def _talk(connection: socket.socket, typed: BinaryIO, shown: BinaryIO) -> None:
    """Pass on what is typed and what is said, until the rank goes on."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        with suppress(OSError):  # a file needs no waiting, and cannot be waited for
            selector.register(typed, selectors.EVENT_READ)
        if len(selector.get_map()) == 1:
            connection.sendall(typed.read())
            connection.shutdown(socket.SHUT_WR)
        while True:
            for key, _ in selector.select():
                if key.fileobj is connection:
                    said = connection.recv(1 << 16)
                    if not said:
                        return
                    shown.write(said)
                    shown.flush()
                elif line := os.read(typed.fileno(), 1 << 16):
                    connection.sendall(line)
                else:
                    selector.unregister(typed)
                    connection.shutdown(socket.SHUT_WR)


def where(job: str | None) -> int:
    """Print where the ranks of a job stand.

    Raises:
        NoSuchJob: there is no such job, or several.
    """
    from triton_dist.debugging import rank_status
    from triton_dist.debugging.rank_status import folder_of

    text, answers = rank_status.report(folder_of(job, "[0-9]*.json"))
    print(text)
    return 0 if answers else 1
