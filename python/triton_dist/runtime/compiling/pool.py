"""The tuner's side of the processes that compile."""

from __future__ import annotations

import multiprocessing.connection
import os
import platform
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import triton

from triton_dist import knobs
from triton_dist.errors import CandidateFailed, CompileTimeout
from triton_dist.runtime.compiling import server
from triton_dist.runtime.compiling.kernels import Kernel, kernels_of
from triton_dist.runtime.compiling.server import Job, Verdict

_PATIENCE = 0.9  # of the limit, at which other ranks give this one up
_MOST_WORKERS = 16  # each takes some hundred megabytes
_POLL_SECONDS = 0.2


class CompilePool:
    """Compiles kernels ahead, in processes that end with :meth:`close`; starts none before
    :meth:`begin`. Where no process can be started, :meth:`wait` compiles."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._begun: set[str] = set()
        self._known: dict[str, Verdict] = {}
        self._servers: dict[Connection, int] = {}
        """By what they say their verdicts through, the processes that compile."""
        self._whose: dict[str, Connection] = {}
        """By kernel, the connection that the verdict on it comes through."""
        self._seconds = knobs.compile_timeout.get()

    @property
    def cache(self) -> str:
        """Host and folder of Triton's disk cache: ranks with the same find one another's
        kernels."""
        return f"{platform.node()}:{os.path.realpath(triton.knobs.cache.dir)}"

    def missing(self, prepare: Callable[[], object]) -> list[str]:
        """Digests of the kernels that ``prepare`` would compile; none is compiled."""
        found = kernels_of(prepare)
        self._kernels.update(found)
        return list(found)

    def begin(self, digests: Sequence[str], sharers: int) -> None:
        """Compile these, in this order, as many at a time as this rank's part of the processors;
        of those that were begun before, whatever is left goes on beside them."""
        digests = [each for each in digests if each not in self._begun]
        self._begun.update(digests)
        if not digests:
            return
        part = len(os.sched_getaffinity(0)) // sharers
        workers = max(1, min(part, len(digests), _MOST_WORKERS))
        job = Job({each: self._kernels[each] for each in digests}, workers, self._seconds)
        own, others = multiprocessing.Pipe()
        with warnings.catch_warnings(), suppress(OSError):  # no process, or no memory, to be had
            # Python warns of forking where there are threads; the server knows what it must not do.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
            if pid == 0:
                server.main(job, others.fileno())
            self._servers[own] = pid
            self._whose.update(dict.fromkeys(digests, own))
        others.close()

    def wait(self, digest: str) -> None:
        """Until that kernel is in the cache; one that no other process can have is compiled here.

        Raises:
            CandidateFailed: it does not compile.
            CompileTimeout: it took longer than ``TRITON_DIST_COMPILE_TIMEOUT``.
        """
        if digest not in self._begun:
            return
        verdict = self._verdict(digest)
        if verdict is None:
            verdict = self._known[digest] = self._compile_here(digest)
        if verdict.status == "timeout":
            raise CompileTimeout(self._kernels[digest].name, self._seconds)
        if verdict.status == "failed":
            raise CandidateFailed(verdict.text)

    def _verdict(self, digest: str) -> Verdict | None:
        """``None``: there is no other process that would tell."""
        deadline = time.monotonic() + _PATIENCE * self._seconds
        while digest not in self._known and self._whose.get(digest) in self._servers:
            if time.monotonic() > deadline:
                return Verdict(digest, "timeout")
            # Take the verdicts that come soon.
            for verdicts in multiprocessing.connection.wait(list(self._servers), _POLL_SECONDS):
                assert isinstance(verdicts, Connection)
                try:
                    verdict: Verdict = verdicts.recv()
                    self._known[verdict.digest] = verdict
                except (EOFError, ConnectionError):  # it is gone: what is left, the caller compiles
                    self._end(verdicts)
        return self._known.get(digest)

    def _compile_here(self, digest: str) -> Verdict:
        try:
            self._kernels[digest].compile()
        except Exception as error:
            return Verdict(digest, "failed", f"{type(error).__name__}: {error}")
        return Verdict(digest, "compiled")

    def close(self) -> None:
        """End the processes, whatever they are at. Idempotent."""
        for verdicts in list(self._servers):
            self._end(verdicts)

    def _end(self, verdicts: Connection) -> None:
        process = self._servers.pop(verdicts)
        verdicts.close()  # it ends its children, then itself
        with suppress(ChildProcessError):  # another thread waited for any child
            deadline = time.monotonic() + _POLL_SECONDS
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(process, signal.SIGKILL)
                    os.waitpid(process, 0)
                    break
                time.sleep(1e-3)
