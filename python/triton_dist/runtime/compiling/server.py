"""The process that compiles.

It imports what the kernels need once and forks a child for each kernel, so that torch is imported
once and not by each child, a compiler that crashes or hangs takes nobody with it, and the tuner's
process, which launches and measures meanwhile, gives its interpreter lock to nobody. It never
touches a GPU, so forking is safe.

The job comes on standard input; verdicts go to the connection whose descriptor is the argument. The
process ends, and its children with it, when all kernels are done or the other end is closed.
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Literal

from triton_dist.runtime.compiling.kernels import Kernel, load

_TAIL = 2000


@dataclass(frozen=True)
class Job:
    """What a process is started for."""

    kernels: list[Kernel]
    """In the order in which they are needed."""
    workers: int
    """So many at a time."""
    seconds: float
    """Longest time for one kernel."""
    path: list[str]
    """``sys.path``"""


@dataclass(frozen=True)
class Verdict:
    """What came of a kernel."""

    digest: str
    status: Literal["compiled", "failed", "timeout", "unavailable"]
    """``unavailable``: it was not tried, since this process cannot have it."""
    text: str = ""


@dataclass
class _Child:
    kernel: Kernel
    pid: int
    pidfd: int
    said: IO[bytes]
    """What it printed, its exception last."""
    deadline: float


class _Server:
    def __init__(self, job: Job, verdicts: Connection) -> None:
        self._job, self._verdicts = job, verdicts
        self._waiting = deque(job.kernels)
        self._children: dict[int, _Child] = {}
        self._events = selectors.DefaultSelector()
        self._events.register(verdicts, selectors.EVENT_READ)  # readable: its other end is closed

    def serve(self) -> None:
        try:
            while self._waiting or self._children:
                self._fill()
                deadlines = [child.deadline for child in self._children.values()]
                if not deadlines:
                    continue
                for key, _ in self._events.select(max(0.0, min(deadlines) - time.monotonic())):
                    if key.fileobj is self._verdicts:
                        return
                    self._ended(self._children.pop(key.fd))
                for child in self._children.values():
                    if time.monotonic() > child.deadline:
                        os.killpg(child.pid, signal.SIGKILL)
        finally:
            for child in self._children.values():
                os.killpg(child.pid, signal.SIGKILL)

    def _fill(self) -> None:
        while self._waiting and len(self._children) < self._job.workers:
            kernel = self._waiting.popleft()
            try:
                compile_it = load(kernel)
            except Exception as error:
                self._verdicts.send(Verdict(kernel.digest, "unavailable", _text(error)))
                continue
            said = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the child has ended
            pid = os.fork()
            if pid == 0:
                _be_child(compile_it, said)
            with suppress(OSError):  # the child does so too: either may come first
                os.setpgid(pid, pid)
            deadline = time.monotonic() + self._job.seconds
            child = _Child(kernel, pid, os.pidfd_open(pid), said, deadline)
            self._children[child.pidfd] = child
            self._events.register(child.pidfd, selectors.EVENT_READ)

    def _ended(self, child: _Child) -> None:
        self._events.unregister(child.pidfd)
        os.close(child.pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        name, digest = child.kernel.name, child.kernel.digest
        with child.said as file:
            file.seek(0)
            said = file.read().decode(errors="replace").strip()[-_TAIL:]
        if code == 0:
            verdict = Verdict(digest, "compiled")
        elif code == -signal.SIGKILL and time.monotonic() > child.deadline:
            verdict = Verdict(digest, "timeout", name)
        elif code > 0:
            verdict = Verdict(digest, "failed", said)
        else:
            signal_name = signal.Signals(-code).name
            verdict = Verdict(digest, "failed", f"the compiler died of {signal_name}. {said}")
        self._verdicts.send(verdict)


def _be_child(compile_it: Any, said: IO[bytes]) -> None:
    """Never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        compile_it()
        status = 0
    except BaseException as error:
        sys.stdout.flush()
        os.write(said.fileno(), f"\n{_text(error)}".encode())
    finally:
        os._exit(status)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the process that started this one to handle
    os.nice(10)  # the processors are the tuner's whenever it wants them
    verdicts = Connection(int(sys.argv[1]))
    job: Job = pickle.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what an imported module prints is no news
        os.dup2(nothing, descriptor)
    sys.path[:] = job.path
    with suppress(BrokenPipeError):  # nobody is interested any more
        _Server(job, verdicts).serve()
    os._exit(0)  # there is nothing to clean up, which takes torch a while


if __name__ == "__main__":
    main()
