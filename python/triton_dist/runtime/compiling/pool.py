"""The tuner's side of the process that compiles."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import triton

from triton_dist import knobs
from triton_dist.errors import CandidateFailed, CompileTimeout
from triton_dist.runtime.compiling.kernels import Kernel, kernels_of
from triton_dist.runtime.compiling.server import Job, Verdict

_PATIENCE = 0.9  # of the limit, at which other ranks give this one up
_MOST_WORKERS = 16  # each takes some hundred megabytes
_POLL_SECONDS = 0.2
_COMMAND = "from triton_dist.runtime.compiling.server import main; main()"
# No GPU, and no threads of libraries: the process forks.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class CompilePool:
    """Compiles kernels ahead, in processes that end with :meth:`close`; starts none before
    :meth:`begin`."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._here: dict[str, Callable[[], None]] = {}
        self._begun: set[str] = set()
        self._known: dict[str, Verdict] = {}
        self._server: subprocess.Popen[bytes] | None = None
        self._verdicts: Connection | None = None
        self._seconds = knobs.compile_timeout.get()

    @property
    def cache(self) -> str:
        """Host and folder of Triton's disk cache: ranks with the same find one another's
        kernels."""
        return f"{platform.node()}:{os.path.realpath(triton.knobs.cache.dir)}"

    def missing(self, prepare: Callable[[], object]) -> list[str]:
        """Digests of the kernels that ``prepare`` would compile; none is compiled."""
        found = kernels_of(prepare)
        self._kernels.update((kernel.digest, kernel) for kernel in found)
        self._here.update((kernel.digest, compile_it) for kernel, compile_it in found.items())
        return [kernel.digest for kernel in found]

    def begin(self, digests: Sequence[str], sharers: int) -> None:
        """Compile these, in this order, as many at a time as this rank's part of the processors."""
        self._begun.update(digests)
        kernels = [kernel for each in digests if (kernel := self._kernels[each]).parts]
        if not kernels:
            return
        part = len(os.sched_getaffinity(0)) // sharers
        workers = max(1, min(part, len(kernels), _MOST_WORKERS))
        job = Job(kernels, workers, self._seconds, sys.path)
        self._verdicts, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        with tempfile.TemporaryFile() as file:
            pickle.dump(job, file)
            file.seek(0)
            self._server = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", _COMMAND, str(theirs.fileno())],
                stdin=file,
                pass_fds=[theirs.fileno()],
                env=knobs.environment() | _ENVIRONMENT | {"PYTHONPATH": path},
                start_new_session=True,
            )
        theirs.close()

    def wait(self, digest: str) -> None:
        """Until that kernel is in the cache; one that no other process can have is compiled here.

        Raises:
            CandidateFailed: it does not compile.
            CompileTimeout: it took longer than ``TRITON_DIST_COMPILE_TIMEOUT``.
        """
        if digest not in self._begun:
            return
        verdict = self._verdict(self._kernels[digest])
        if verdict.status == "unavailable":
            verdict = self._known[digest] = self._compile_here(digest)
        if verdict.status == "timeout":
            raise CompileTimeout(self._kernels[digest].name, self._seconds)
        if verdict.status == "failed":
            raise CandidateFailed(verdict.text)

    def _verdict(self, kernel: Kernel) -> Verdict:
        deadline = time.monotonic() + _PATIENCE * self._seconds
        while kernel.parts and kernel.digest not in self._known and self._server is not None:
            if time.monotonic() > deadline:
                return Verdict(kernel.digest, "timeout")
            self._listen()
        return self._known.get(kernel.digest, Verdict(kernel.digest, "unavailable"))

    def _compile_here(self, digest: str) -> Verdict:
        try:
            self._here[digest]()
        except Exception as error:
            return Verdict(digest, "failed", f"{type(error).__name__}: {error}")
        return Verdict(digest, "compiled")

    def close(self) -> None:
        """End the processes, whatever they are at. Idempotent."""
        process, self._server = self._server, None
        if process is None or self._verdicts is None:
            return
        self._verdicts.close()  # it ends its children, then itself
        try:
            process.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:  # it is importing
            process.kill()
            process.wait()

    def _listen(self) -> None:
        """Take one verdict, if one comes soon."""
        assert self._verdicts is not None
        try:
            if self._verdicts.poll(_POLL_SECONDS):
                verdict: Verdict = self._verdicts.recv()
                self._known[verdict.digest] = verdict
        except (EOFError, ConnectionError):  # it is gone: what is left, the caller compiles itself
            self.close()
