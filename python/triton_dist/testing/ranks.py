"""Run a function in several ranks, each a process, and get every rank's result or failure.

    >>> results = spawn_ranks(2, all_gather_once, torch.float16, timeout=30)

Ranks are forked from a server that has imported torch, Triton and the tuner already, so that a
rank starts in tens of milliseconds; a fresh interpreter takes some seconds for each.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from triton_dist import knobs
from triton_dist.errors import InvalidArgument, RankFailure, RanksFailed
from triton_dist.testing import rank_process
from triton_dist.testing.rank_process import RankTask, Returned

T = TypeVar("T")

EXIT_SECONDS = 10.0
"""Time that a rank has to exit after it reported."""

_server_settings: dict[str, str] | None = None


def spawn_ranks(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    timeout: float = 60.0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    device: str = "cpu",
    share_gpus: bool = False,
    init: bool = True,
    poison_empty: bool = True,
    fresh: bool = False,
) -> list[T]:
    """``fn(*args)`` in ``world_size`` processes; what they return, ordered by rank.

    ``fn`` is a function at the top of an importable module; it, ``args`` and results are pickled.
    A rank finds the variables of a torchrun worker (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...)
    in its environment, a copy of the caller's with ``env`` on top, and has one torch thread. No
    process, and nothing in /dev/shm, is left behind whatever happens.

    Args:
        timeout: seconds for everything, start included.
        grace: seconds that the other ranks have to end by themselves once one has failed.
        device: ``"cpu"``: ranks interpret kernels. ``"cuda"``: rank i compiles and runs on GPU i.
        share_gpus: with fewer GPUs than ranks, several ranks have a GPU.
        init: initialise the default process group: gloo on CPU ranks and where ranks share GPUs,
            gloo and NCCL on GPUs.
        poison_empty: ranks run under :func:`triton_dist.testing.poisoned_empty`.
        fresh: ranks are new interpreters that have imported no kernel, for libraries that must be
            imported before any; takes some seconds.

    Raises:
        RanksFailed: some rank raised, died or was stuck; has each one's traceback.
    """
    if device not in ("cpu", "cuda"):
        raise InvalidArgument("spawn_ranks", "device", device, "'cpu' or 'cuda'")
    if world_size < 1:
        raise InvalidArgument("spawn_ranks", "world_size", world_size, "at least 1")
    begin = time.monotonic()
    call = _pickled_call(fn, args)
    # The ranks' rendezvous, on a port that the system chose and that nobody can take meanwhile.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    base = _environment(world_size, store.port, device) | dict(env or {})
    if share_gpus:
        base |= {"TRITON_DIST_SHARE_GPUS": "1"}
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(prefix="triton_dist_ranks_") as folder:
        try:
            with _environment_of_ranks(base):
                context = multiprocessing.get_context("spawn") if fresh else _context(base)
                for rank in range(world_size):
                    own = base | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                    stacks = str(Path(folder, f"{rank}.stacks"))
                    task = RankTask(rank, own, call, device, init, timeout, stacks, poison_empty)
                    ranks.append(_Rank(context, task))
            failures = _collect(ranks, begin + timeout, grace, timeout)
        finally:
            for spawned in ranks:
                spawned.kill()
    if failures:
        raise RanksFailed(getattr(fn, "__qualname__", repr(fn)), world_size, failures)
    return [pickle.loads(spawned.value) for spawned in ranks]


class _Rank:
    """One running rank, as its parent sees it."""

    def __init__(self, context: Any, task: RankTask) -> None:
        self.rank = task.rank
        self.value = b""
        self.stacks = Path(task.stacks)
        self.reports, theirs = context.Pipe(duplex=False)
        self.process = context.Process(
            target=rank_process.main, args=(task, theirs), name=f"rank {task.rank}"
        )
        self.process.start()
        theirs.close()  # the rank's copy is the only one now: its death is the end of the pipe

    def receive(self) -> RankFailure | None:
        """Take the report, which is there or will never come; ``None`` is success."""
        try:
            report: Returned | RankFailure = pickle.loads(self.reports.recv_bytes())
        except EOFError:
            self.process.join(EXIT_SECONDS)
            return RankFailure("Died", f"{self._ending()} before it reported", self._stacks_text())
        self.process.join(EXIT_SECONDS)
        if isinstance(report, RankFailure):
            return report
        if self.process.exitcode != 0:
            self.dump_stacks()
            return RankFailure(
                "Died", f"{self._ending()} after its function returned", self._stacks_text()
            )
        self.value = report.value
        return None

    def stuck(self, message: str) -> RankFailure:
        return RankFailure("TimedOut", message, self._stacks_text())

    def dump_stacks(self) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, rank_process.STACKS_SIGNAL)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.reports.close()

    def _ending(self) -> str:
        code = self.process.exitcode
        if code is None:
            return f"did not exit within {EXIT_SECONDS:.0f} s"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with status {code}"

    def _stacks_text(self) -> str:
        """What faulthandler wrote; it is asked by a signal, so it may need a moment."""
        limit = time.monotonic() + 2.0
        while self.process.is_alive() and time.monotonic() < limit:
            if self.stacks.exists() and self.stacks.stat().st_size:
                time.sleep(0.05)  # let it finish the last thread
                break
            time.sleep(0.01)
        return self.stacks.read_text() if self.stacks.exists() else ""


def _collect(
    ranks: list[_Rank], deadline: float, grace: float, timeout: float
) -> dict[int, RankFailure]:
    """Wait for every rank's report; the failures, in the order in which they came."""
    failures: dict[int, RankFailure] = {}
    pending = {spawned.reports: spawned for spawned in ranks}
    overdue = f"still running after {timeout:g} s"
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            for spawned in pending.values():
                spawned.dump_stacks()
            return failures | {spawned.rank: spawned.stuck(overdue) for spawned in pending.values()}
        for reports in ready:
            spawned = pending.pop(reports)
            failure = spawned.receive()
            if failure is None:
                continue
            if not failures and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                overdue = f"still running {grace:g} s after rank {spawned.rank} failed"
            failures[spawned.rank] = failure
    return failures


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidArgument(
            "spawn_ranks",
            "fn",
            fn,
            f"a function at the top of a module and args that pickle ({error})",
        ) from error


def _environment(world_size: int, port: int, device: str) -> dict[str, str]:
    environment = knobs.environment() | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: the store is there already, so rank 0 connects to it like the others.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TRITON_DIST_DEVICE": device,
    }
    if sys.platform == "linux":
        # Gloo otherwise looks the host's name up, which fails or takes seconds on some machines.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cpu":
        return environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


@contextmanager
def _environment_of_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """What is started meanwhile inherits ``environment``."""
    before = knobs.environment()
    knobs.replace_environment(environment)
    try:
        yield
    finally:
        knobs.replace_environment(before)


def _context(environment: Mapping[str, str]) -> Any:
    """Where ranks come from: the fork server, or fresh interpreters if it was started with other
    settings of the kind that torch and Triton read once, when they are imported."""
    global _server_settings
    read_at_import = ("TRITON_INTERPRET", "TORCH_", "OMP_", "PYTHON")
    settings = {
        name: value for name, value in environment.items() if name.startswith(read_at_import)
    }
    if _server_settings is None:
        _server_settings = settings
    if settings != _server_settings:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    preload = ["torch", "torch.distributed", "triton", "triton.language"]
    preload += ["triton_dist.tune", "triton_dist.autotuner", "triton_dist.runtime.symmetric"]
    if environment.get("TRITON_INTERPRET") == "1":
        preload.append("triton_dist.testing.warm_kernels")
    # Modules of tests import pytest, so ranks that run functions from them need it too.
    context.set_forkserver_preload(preload + (["pytest"] if "pytest" in sys.modules else []))
    forkserver.ensure_running()  # here, in the environment that the server must have
    return context
