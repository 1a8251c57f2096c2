"""Ranks that stay for many calls: processes with one world, started once.

Joining a world costs a rank some tenths of a second, on a GPU some seconds: a context, modules that
are imported, kernels that are loaded. Tests on GPUs share ranks for that reason.

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
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.process import _children  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from triton_dist import knobs
from triton_dist.errors import InvalidArgument, RankFailure, RanksFailed
from triton_dist.testing import rank_process
from triton_dist.testing.rank_process import RankCall, RankTask, Returned

T = TypeVar("T")

EXIT_SECONDS = 10.0
"""Time that a rank has to exit after it reported."""

_server_settings: dict[str, str] | None = None


@dataclass
class RankPool(AbstractContextManager["RankPool"]):
    """``world_size`` ranks, started by the first call. Use as a context manager, or call ``close``.

    A call that fails on some rank ends them all, and the next one starts new ones.

    Args:
        env, device, share_gpus, init, poison_empty, fresh: as of ``spawn_ranks``.
        timeout: of the process group, in seconds.
    """

    world_size: int
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    share_gpus: bool = False
    init: bool = True
    poison_empty: bool = True
    fresh: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        self._ranks: list[_Rank] = []

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        last: bool = False,
    ) -> list[T]:
        """``fn(*args)`` on all ranks; what they return, ordered by rank.

        Args:
            timeout: seconds for everything, a start included.
            grace: seconds that the other ranks have to end by themselves once one has failed.
            last: ranks end after this call, and have to do so well.

        Raises:
            RanksFailed: some rank raised, died or was stuck; has each one's traceback.
        """
        begin = time.monotonic()
        call = _pickled_call(fn, args)
        failures: dict[int, RankFailure] = {}
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.send(RankCall(self._environment_of(rank.rank), call), last)
            failures = _collect(self._ranks, begin + timeout, grace, timeout, last)
            values = [rank.value for rank in self._ranks]
        except BaseException:
            self.close()
            raise
        if failures or last:
            self.close()
        if failures:
            raise RanksFailed(getattr(fn, "__qualname__", repr(fn)), self.world_size, failures)
        return [pickle.loads(value) for value in values]

    def close(self) -> None:
        """End all ranks; idempotent."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.leave()
        if ranks:
            self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # The ranks' rendezvous, on a port that the system chose and that nobody can take meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="triton_dist_ranks_")
        base = self._environment()
        with _environment_of_ranks(base):
            context = multiprocessing.get_context("spawn") if self.fresh else _context(base)
            for rank in range(self.world_size):
                stacks = str(Path(self._folder.name, f"{rank}.stacks"))
                task = RankTask(
                    rank, self._environment_of(rank), self.device, self.init, self.timeout, stacks,
                    self.poison_empty, self.fresh,
                )  # fmt: skip
                self._ranks.append(_Rank(context, task))

    def _environment_of(self, rank: int) -> dict[str, str]:
        return self._environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def _environment(self) -> dict[str, str]:
        environment = _environment(self.world_size, self._store.port, self.device)
        if self.share_gpus:
            environment["TRITON_DIST_SHARE_GPUS"] = "1"
        return environment | dict(self.env)


class _Rank:
    """One running rank, as its parent sees it."""

    def __init__(self, context: Any, task: RankTask) -> None:
        self.rank = task.rank
        self.value = b""
        self.stacks = Path(task.stacks)
        self.messages, theirs = context.Pipe()
        self.process = context.Process(
            target=rank_process.main, args=(task, theirs), name=f"rank {task.rank}"
        )
        self.process.start()
        theirs.close()  # the rank's copy is the only one now: its death is the end of the pipe

    def send(self, call: RankCall, last: bool) -> None:
        """Ask for ``call``, the ``last`` one or not. A rank that is gone says so by its report."""
        with suppress(BrokenPipeError):
            for message in (call, None) if last else (call,):
                self.messages.send_bytes(pickle.dumps(message))

    def receive(self, last: bool) -> RankFailure | None:
        """Take the report, which is there or will never come; ``None`` is success."""
        try:
            report: Returned | RankFailure = pickle.loads(self.messages.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_SECONDS)
            return RankFailure("Died", f"{self._ending()} before it reported", self._stacks_text())
        if last or isinstance(report, RankFailure):
            self.process.join(EXIT_SECONDS)
        if isinstance(report, RankFailure):
            return report
        if last and self.process.exitcode != 0:
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

    def leave(self) -> None:
        """Wait until the process, which was killed, is gone, or let it be: one whose GPU is at work
        that does not end may stay for as long."""
        self.process.join(EXIT_SECONDS)
        if self.process.exitcode is None:
            what = f"rank {self.rank}, process {self.process.pid}, is still there"
            why = "the driver may be waiting for a kernel that does not end"
            warnings.warn(f"{what} {EXIT_SECONDS:.0f} s after it was killed: {why}", stacklevel=2)
            _children.discard(self.process)  # else this interpreter waits for it at its end
        else:
            self.process.close()
        self.messages.close()

    def _ending(self) -> str:
        code = self.process.exitcode
        if code is None:
            return f"did not exit within {EXIT_SECONDS:.0f} s"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with status {code}"

    def _stacks_text(self) -> str:
        """Stacks as faulthandler wrote them; it is asked by a signal, so it may need a moment."""
        limit = time.monotonic() + 2.0
        while self.process.is_alive() and time.monotonic() < limit:
            if self.stacks.exists() and self.stacks.stat().st_size:
                time.sleep(0.05)  # let it finish the last thread
                break
            time.sleep(0.01)
        text = self.stacks.read_text() if self.stacks.exists() else ""
        return text or "\n".join(_threads_of(self.process.pid))


def _threads_of(pid: int) -> Iterator[str]:
    """Threads of a process that does not answer a signal with its stacks, a line each, by Linux:
    name, state, and the function of the kernel that it waits in."""
    with suppress(OSError):  # it has ended, or this is no Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            name, waits_in = ((thread / each).read_text().strip() for each in ("comm", "wchan"))
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            yield f"Thread {thread.name} ({name}): state {state}, in {waits_in}"


def _collect(
    ranks: list[_Rank], deadline: float, grace: float, timeout: float, last: bool
) -> dict[int, RankFailure]:
    """Wait for every rank's report; the failures, in the order in which they came."""
    failures: dict[int, RankFailure] = {}
    pending = {spawned.messages: spawned for spawned in ranks}
    overdue = f"still running after {timeout:g} s"
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            for spawned in pending.values():
                spawned.dump_stacks()
            return failures | {spawned.rank: spawned.stuck(overdue) for spawned in pending.values()}
        for messages in ready:
            spawned = pending.pop(messages)
            failure = spawned.receive(last)
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
    # By the rule of runtime.device.interprets_kernels.
    if device == "cpu":
        environment["TRITON_INTERPRET"] = environment.get("TRITON_INTERPRET") or "1"
        return environment | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


@contextmanager
def _environment_of_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """Let what is started meanwhile inherit ``environment``."""
    before = knobs.environment()
    knobs.replace_environment(environment)
    try:
        yield
    finally:
        knobs.replace_environment(before)


def _context(environment: Mapping[str, str]) -> Any:
    """The source of ranks: the fork server, or fresh interpreters if it was started with other
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
        InvalidArgument: ``world_size`` is no number of ranks, ``device`` is another, or ``fn`` is
            not at the top of a module.
        RanksFailed: some rank raised, died or was stuck; has each one's traceback.
    """
    if device not in ("cpu", "cuda"):
        raise InvalidArgument("spawn_ranks", "device", device, "'cpu' or 'cuda'")
    if not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgument("spawn_ranks", "world_size", world_size, "an int, 1 or more")
    pool = RankPool(world_size, env or {}, device, share_gpus, init, poison_empty, fresh, timeout)
    return pool.run(fn, *args, timeout=timeout, grace=grace, last=True)
