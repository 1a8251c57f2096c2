"""The server process that compiles kernels for a rank.

The rank forks the server, so the server does not repeat imports, which take seconds. The server
forks a child for each kernel: if the compiler crashes or hangs, only this child is affected.
Compilation does not hold the GIL of the rank, which launches and measures at the same time.

A process that uses CUDA may fork if the child uses neither CUDA nor the state of other threads,
like the workers of ``torch.utils.data.DataLoader``. Therefore the server frees no objects of the
rank, and ends only with ``os._exit``.

The server sends the results ("verdicts") over a connection. The server and its children end when
all kernels are compiled, or when the rank closes its end of the connection.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Literal, NoReturn

from triton_dist.runtime.compiling.kernels import Kernel, use_target

_MAX_OUTPUT = 2000  # characters


@dataclass(frozen=True)
class Job:
    """Work for a server."""

    kernels: Mapping[str, Kernel]
    """Kernels by digest, in the order in which they are needed."""
    num_workers: int
    """Number of kernels to compile in parallel."""
    limit_seconds: float
    """Time limit for one kernel in seconds."""


@dataclass(frozen=True)
class Verdict:
    """Result of compiling a kernel."""

    digest: str
    status: Literal["compiled", "failed", "timeout"]
    text: str = ""
    """Error, and the end of the compiler's output."""


@dataclass
class _Child:
    digest: str
    pid: int
    pidfd: int
    output: IO[bytes]
    """The child's output. If the compilation raises, the output ends with the exception."""
    deadline: float


class _Server:
    def __init__(self, job: Job, connection: Connection) -> None:
        self._job, self._connection = job, connection
        self._waiting = deque(job.kernels.items())
        self._children: dict[int, _Child] = {}
        self._events = selectors.DefaultSelector()
        # The connection becomes readable when its other end is closed.
        self._events.register(connection, selectors.EVENT_READ)

    def serve(self) -> None:
        try:
            while self._waiting or self._children:
                self._start_children()
                deadlines = [child.deadline for child in self._children.values()]
                if not deadlines:
                    continue
                for key, _ in self._events.select(max(0.0, min(deadlines) - time.monotonic())):
                    if key.fileobj is self._connection:
                        return
                    self._report(self._children.pop(key.fd))
                for child in self._children.values():
                    if time.monotonic() > child.deadline:
                        os.killpg(child.pid, signal.SIGKILL)
        finally:
            for child in self._children.values():
                os.killpg(child.pid, signal.SIGKILL)

    def _start_children(self) -> None:
        while self._waiting and len(self._children) < self._job.num_workers:
            digest, kernel = self._waiting.popleft()
            output = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child has ended
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    os.setpgid(0, 0)
                    # If the server is killed, the rank then sees the end of the connection.
                    self._connection.close()
                    os.dup2(output.fileno(), 1)
                    os.dup2(output.fileno(), 2)
                    use_target(kernel.target)
                    kernel.compile()
                    status = 0
                except BaseException as error:
                    sys.stdout.flush()
                    os.write(output.fileno(), f"\n{type(error).__name__}: {error}".encode())
                finally:
                    os._exit(status)
            with suppress(OSError):  # the child also calls this: either process may be first
                os.setpgid(pid, pid)
            deadline = time.monotonic() + self._job.limit_seconds
            child = _Child(digest, pid, os.pidfd_open(pid), output, deadline)
            self._children[child.pidfd] = child
            self._events.register(child.pidfd, selectors.EVENT_READ)

    def _report(self, child: _Child) -> None:
        self._events.unregister(child.pidfd)
        os.close(child.pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        with child.output as file:
            file.seek(0)
            output = file.read().decode(errors="replace").strip()[-_MAX_OUTPUT:]
        if code == 0:
            verdict = Verdict(child.digest, "compiled")
        elif code == -signal.SIGKILL and time.monotonic() > child.deadline:
            verdict = Verdict(child.digest, "timeout")
        elif code > 0:
            verdict = Verdict(child.digest, "failed", output)
        else:
            reason = f"the compiler died of {signal.Signals(-code).name}. {output}"
            verdict = Verdict(child.digest, "failed", reason)
        self._connection.send(verdict)


def main(job: Job, connection_fd: int) -> NoReturn:
    """Compile the kernels of ``job`` in a process that was just forked.

    Args:
        connection_fd: file descriptor of the connection for verdicts.
    """
    try:
        gc.disable()  # finalisers may call CUDA
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.nice(10)  # the rank has priority
        # Close all inherited descriptors: sockets, locks and files of a rank must not outlive it.
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # each child redirects the compiler's output to a file
            os.dup2(null, standard)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor != connection_fd:
                with suppress(OSError):  # ``listdir`` has already closed its own descriptor
                    os.close(descriptor)
        with suppress(BrokenPipeError):  # the rank has closed the connection
            _Server(job, Connection(connection_fd)).serve()
    finally:
        os._exit(0)
