"""Start and query the processes that compile kernels for the tuner."""

from __future__ import annotations

import multiprocessing.connection
import os
import platform
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import triton

from triton_dist import knobs
from triton_dist.errors import CandidateFailed, CompileTimeout
from triton_dist.runtime.compiling import server
from triton_dist.runtime.compiling.kernels import Kernel, kernels_to_compile
from triton_dist.runtime.compiling.server import Job, Verdict

_WAIT_FRACTION = 0.9  # of the compile time limit; after the full limit, other ranks stop waiting
_MAX_WORKERS = 16  # a process takes several hundred MB
_POLL_SECONDS = 0.2
_END_SECONDS = 2.0


class CompilePool:
    """Processes that compile kernels before their first use. If no process can be started,
    :meth:`wait` compiles in this process. Kernels are identified by their digest, the key in
    Triton's disk cache. A *verdict* is the result of a compilation."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._begun_digests: set[str] = set()
        self._verdicts: dict[str, Verdict] = {}
        self._servers: dict[Connection, int] = {}
        """Process ids of the compiling processes, by the connection for their verdicts."""
        self._connection_by_digest: dict[str, Connection] = {}
        """The connection for the verdict on a kernel, by digest."""
        self._limit_seconds = knobs.compile_timeout.get()

    @property
    def cache(self) -> str:
        """Return host and folder of Triton's disk cache; equal values mean a shared cache."""
        return f"{platform.node()}:{os.path.realpath(triton.knobs.cache.dir)}"

    def collect(self, prepare: Callable[[], object]) -> list[str]:
        """Register the kernels that ``prepare`` would compile, without compiling them, and return
        their digests. Kernels that are in the disk cache are left out."""
        found = kernels_to_compile(prepare)
        self._kernels.update(found)
        return list(found)

    def begin(self, digests: Sequence[str], num_sharing_ranks: int) -> None:
        """Compile these kernels in this order, in parallel.

        Compilations of earlier calls continue concurrently.

        Args:
            digests: results of ``collect``. Kernels that were passed before are ignored.
            num_sharing_ranks: number of ranks n that compile on this host. This rank uses at most
                1 / n of the host's cores.
        """
        digests = [each for each in digests if each not in self._begun_digests]
        self._begun_digests.update(digests)
        if not digests:
            return
        num_workers = max(
            1, min(len(os.sched_getaffinity(0)) // num_sharing_ranks, len(digests), _MAX_WORKERS)
        )
        job = Job({each: self._kernels[each] for each in digests}, num_workers, self._limit_seconds)
        # Out of file descriptors, processes or memory: ``wait`` compiles.
        with warnings.catch_warnings(), suppress(OSError):
            receiver, sender = multiprocessing.Pipe()
            # Python warns about a fork with threads; the server does not touch their state.
            warnings.simplefilter("ignore", DeprecationWarning)
            with sender:
                pid = os.fork()
                if pid == 0:
                    server.main(job, sender.fileno())
            self._servers[receiver] = pid
            self._connection_by_digest.update(dict.fromkeys(digests, receiver))

    def wait(self, digest: str) -> None:
        """Wait until a kernel passed to ``begin`` is in the cache.

        Compile it here if no process is compiling it. Return immediately for other kernels.

        Raises:
            CandidateFailed: the kernel does not compile.
            CompileTimeout: compilation took longer than ``TRITON_DIST_COMPILE_TIMEOUT``, or this
                wait took longer than 0.9 times this limit.
        """
        if digest not in self._begun_digests:
            return
        verdict = self._verdict(digest)
        if verdict is None:
            verdict = self._verdicts[digest] = self._compile_here(digest)
        if verdict.status == "timeout":
            raise CompileTimeout(self._kernels[digest].name, self._limit_seconds)
        if verdict.status == "failed":
            raise CandidateFailed(verdict.text)

    def _verdict(self, digest: str) -> Verdict | None:
        """Return the verdict on a kernel, or ``None`` if no other process compiles it."""
        deadline = time.monotonic() + _WAIT_FRACTION * self._limit_seconds
        while (
            digest not in self._verdicts and self._connection_by_digest.get(digest) in self._servers
        ):
            if time.monotonic() > deadline:
                return Verdict(digest, "timeout")
            # Receive the verdicts that are available.
            for connection in multiprocessing.connection.wait(list(self._servers), _POLL_SECONDS):
                assert isinstance(connection, Connection)
                try:
                    verdict: Verdict = connection.recv()
                    self._verdicts[verdict.digest] = verdict
                except (EOFError, ConnectionError):
                    self._end(connection)  # the process died: the caller compiles its kernels
        return self._verdicts.get(digest)

    def _compile_here(self, digest: str) -> Verdict:
        try:
            self._kernels[digest].compile()
        except Exception as error:
            return Verdict(digest, "failed", f"{type(error).__name__}: {error}")
        return Verdict(digest, "compiled")

    def close(self) -> None:
        """End the processes, even while they compile. Idempotent."""
        for connection in list(self._servers):
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        pid = self._servers.pop(connection)
        connection.close()  # the process then ends its children and itself
        # If the rank uses CUDA, the end takes 0.3 s: the process unmaps the rank's memory.
        threading.Thread(
            target=_reap, args=(pid,), name="triton_dist-compile-pool", daemon=True
        ).start()


def _reap(pid: int) -> None:
    """Wait until the child process ``pid`` has ended, and kill it if this takes too long."""
    deadline = time.monotonic() + _END_SECONDS
    with suppress(ChildProcessError):  # another thread may have waited for any child
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.01)
