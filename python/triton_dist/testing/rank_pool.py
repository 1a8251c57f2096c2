"""Start processes (ranks) for tests, and run functions in them.

Ranks are forked from a server process that has imported torch, Triton and the tuner. A forked rank
starts in tens of milliseconds, a new interpreter in some seconds. Joining the process group takes
some tenths of a second; on a GPU, where a rank also creates a CUDA context and loads kernels, some
seconds. Tests on GPUs therefore share a ``RankPool``.
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
"""Seconds within which a rank must exit after its last report."""

_server_settings: dict[str, str] | None = None
"""Environment variables of the fork server that torch and Triton read at import."""


@dataclass
class RankPool(AbstractContextManager["RankPool"]):
    """Ranks that run one call after another. A context manager; otherwise call ``close``.

    The first ``run`` starts the ranks. A call that fails on a rank ends all ranks; the next call
    starts new ranks.

    Args:
        world_size: number of ranks.
        env, device, share_gpus, init, poison_empty, new_interpreters: see ``spawn_ranks``.
        timeout: time limit of the process group, in seconds.
    """

    world_size: int
    env: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    share_gpus: bool = False
    init: bool = True
    poison_empty: bool = True
    new_interpreters: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        self._ranks: list[_Rank] = []

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = 60.0,
        grace: float = 10.0,
        is_last: bool = False,
    ) -> list[T]:
        """Return the results of ``fn(*args)`` on all ranks, in rank order.

        Args:
            timeout: time limit in seconds, including the start of ranks.
            grace: seconds until the other ranks are killed after a rank has failed.
            is_last: end the ranks after this call; an exit status other than 0 is a failure.

        Raises:
            RanksFailed: a rank raised, died or hung. The error has a traceback for each such rank.
        """
        begin = time.monotonic()
        call = _pickled_call(fn, args)
        failures: dict[int, RankFailure] = {}
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.send(RankCall(self._environment_of(rank.rank), call), is_last)
            failures = _collect(self._ranks, begin + timeout, grace, timeout, is_last)
            values = [rank.value for rank in self._ranks]
        except BaseException:
            self.close()
            raise
        if failures or is_last:
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
            rank.join_killed()
        if ranks:
            self._folder.cleanup()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        # Server of the ranks' store. The system chooses a free port, and the open socket keeps it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="triton_dist_ranks_")
        base = self._environment()
        main = sys.modules["__main__"]
        # Triton's interpreter copies its globals, with ``__file__``, into the module of a kernel.
        # If this module is a notebook's, multiprocessing would run interpreter.py in each rank.
        if str(getattr(main, "__file__", "")).endswith("triton/runtime/interpreter.py"):
            del main.__file__
        with _environment_of_ranks(base):
            context = (
                multiprocessing.get_context("spawn")
                if self.new_interpreters
                else _process_context(base)
            )
            for rank in range(self.world_size):
                stacks = str(Path(self._folder.name, f"{rank}.stacks"))
                task = RankTask(
                    rank, self._environment_of(rank), self.device, self.init, self.timeout, stacks,
                    self.poison_empty, self.new_interpreters,
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
    """One running rank, seen from its parent."""

    def __init__(self, context: Any, task: RankTask) -> None:
        self.rank = task.rank
        self.value = b""
        self.stacks = Path(task.stacks)
        self.messages, child_end = context.Pipe()
        self.process = context.Process(
            target=rank_process.main, args=(task, child_end), name=f"rank {task.rank}"
        )
        self.process.start()
        child_end.close()  # the pipe then closes when the rank, which has the other copy, dies

    def send(self, call: RankCall, is_last: bool) -> None:
        """Send ``call``; if the rank has died, ``receive`` reports this."""
        with suppress(BrokenPipeError):
            for message in (call, None) if is_last else (call,):
                self.messages.send_bytes(pickle.dumps(message))

    def receive(self, is_last: bool) -> RankFailure | None:
        """Receive the report of a call, or detect the rank's death; return ``None`` for success."""
        try:
            report: Returned | RankFailure = pickle.loads(self.messages.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_SECONDS)
            return RankFailure(
                "Died", f"{self._exit_text()} before it reported", self.stacks_text()
            )
        if is_last or isinstance(report, RankFailure):
            self.process.join(EXIT_SECONDS)
        if isinstance(report, RankFailure):
            return report
        if is_last and self.process.exitcode != 0:
            self.dump_stacks()
            return RankFailure(
                "Died", f"{self._exit_text()} after its function returned", self.stacks_text()
            )
        self.value = report.value
        return None

    def dump_stacks(self) -> None:
        if self.process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, rank_process.STACKS_SIGNAL)

    def join_killed(self) -> None:
        """Wait until the killed process has exited; give up after ``EXIT_SECONDS``. A process whose
        GPU runs an endless kernel may not exit."""
        self.process.join(EXIT_SECONDS)
        if self.process.exitcode is None:
            what = f"rank {self.rank}, process {self.process.pid}, has not exited"
            why = "the driver may be waiting for a kernel that does not end"
            warnings.warn(f"{what} {EXIT_SECONDS:.0f} s after a kill: {why}", stacklevel=2)
            _children.discard(self.process)  # else Python joins the process at exit
        else:
            self.process.close()
        self.messages.close()

    def _exit_text(self) -> str:
        code = self.process.exitcode
        if code is None:
            return f"did not exit within {EXIT_SECONDS:.0f} s"
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"exited with status {code}"

    def stacks_text(self) -> str:
        """Return the stacks that faulthandler wrote; wait up to 2 s for its signal handler."""
        limit = time.monotonic() + 2.0
        while self.process.is_alive() and time.monotonic() < limit:
            if self.stacks.exists() and self.stacks.stat().st_size:
                time.sleep(0.05)  # faulthandler may not have written all threads yet
                break
            time.sleep(0.01)
        text = self.stacks.read_text() if self.stacks.exists() else ""
        return text or "\n".join(_threads_of(self.process.pid))


def _threads_of(pid: int) -> Iterator[str]:
    """Yield name, state, and function of the Linux kernel of each waiting thread of a process. Used
    for a process that does not write its Python stacks."""
    with suppress(OSError):  # the process has ended, or the system is not Linux
        for thread in Path(f"/proc/{pid}/task").iterdir():
            name, waits_in = ((thread / each).read_text().strip() for each in ("comm", "wchan"))
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            yield f"Thread {thread.name} ({name}): state {state}, in {waits_in}"


def _collect(
    ranks: list[_Rank], deadline: float, grace: float, timeout: float, is_last: bool
) -> dict[int, RankFailure]:
    """Wait for the reports of all ranks; return the failures in order of arrival."""
    failures: dict[int, RankFailure] = {}
    pending = {spawned.messages: spawned for spawned in ranks}
    overdue = f"still running after {timeout:g} s"
    while pending:
        ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            for spawned in pending.values():
                spawned.dump_stacks()
            return failures | {
                spawned.rank: RankFailure("TimedOut", overdue, spawned.stacks_text())
                for spawned in pending.values()
            }
        for messages in ready:
            spawned = pending.pop(messages)
            failure = spawned.receive(is_last)
            if failure is None:
                continue
            if not failures and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                overdue = f"still running {grace:g} s after rank {spawned.rank} failed"
            failures[spawned.rank] = failure
    return failures


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    code = getattr(fn, "__code__", None)
    if code is not None and fn.__module__ == "__main__" and not Path(code.co_filename).is_file():
        expected = "a function in a file. Ranks are new processes, which cannot import functions "
        expected += "of a notebook or an interactive session. Write the function to a file (in a "
        expected += "notebook, begin the cell with %%writefile ranks.py) and import it"
        raise InvalidArgument("spawn_ranks", "fn", fn, expected)
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
        # The store's server already exists, so rank 0 must also connect as a client.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TRITON_DIST_DEVICE": device,
    }
    if sys.platform == "linux":
        # Otherwise gloo resolves the host name, which fails or takes seconds on some machines.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Same rule as runtime.device.interprets_kernels.
    if device == "cpu":
        environment["TRITON_INTERPRET"] = environment.get("TRITON_INTERPRET") or "1"
        return environment | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    return environment


@contextmanager
def _environment_of_ranks(environment: Mapping[str, str]) -> Iterator[None]:
    """Context manager in which started processes inherit ``environment``."""
    before = knobs.environment()
    knobs.replace_environment(environment)
    try:
        yield
    finally:
        knobs.replace_environment(before)


def _process_context(environment: Mapping[str, str]) -> Any:
    """Return the multiprocessing context for new ranks: the fork server or new interpreters. torch
    and Triton read some environment variables at import. If these variables differ from the running
    server's, ranks are new interpreters."""
    global _server_settings
    read_at_import = ("TRITON_INTERPRET", "TORCH_", "OMP_", "PYTHON")
    settings = {key: value for key, value in environment.items() if key.startswith(read_at_import)}
    if _server_settings is None:
        _server_settings = settings
    if settings != _server_settings:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    preload = ["torch", "torch.distributed", "triton", "triton.language"]
    preload += ["triton_dist.tune", "triton_dist.autotuner", "triton_dist.runtime.symmetric"]
    if environment.get("TRITON_INTERPRET") == "1":
        preload.append("triton_dist.testing.warm_kernels")
    # Test modules import pytest, so ranks that run their functions need pytest too.
    context.set_forkserver_preload(preload + (["pytest"] if "pytest" in sys.modules else []))
    forkserver.ensure_running()  # start it now, with the environment that it must have
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
    new_interpreters: bool = False,
) -> list[T]:
    """Run ``fn(*args)`` in ``world_size`` processes; return the results in rank order.

    ``fn`` must be a top-level function of an importable module, not of a notebook. ``fn``,
    ``args`` and results are pickled. Ranks have the environment variables of a torchrun worker
    (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...) and one torch thread. When the function
    returns, all processes have ended, and their files in /dev/shm are removed.

    Args:
        world_size: number of ranks.
        fn: function to run.
        args: arguments of ``fn``.
        timeout: time limit in seconds, including the start of the ranks.
        grace: seconds until the other ranks are killed after a rank has failed.
        env: environment variables, added to a copy of the caller's environment.
        device: ``"cpu"``: ranks interpret kernels. ``"cuda"``: rank i compiles and runs on GPU i.
        share_gpus: allow fewer GPUs than ranks; several ranks then use one GPU.
        init: initialise the default process group: gloo, and NCCL on GPUs that are not shared.
        poison_empty: run ranks under :func:`triton_dist.testing.poisoned_empty`.
        new_interpreters: start new Python interpreters instead of forks, for libraries that must be
            imported before any kernel. Takes some seconds.

    Returns:
        Result of each rank.

    Raises:
        InvalidArgument: invalid ``world_size`` or ``device``; ``fn`` is not a top-level function.
        RanksFailed: a rank raised, died or hung. The error has a traceback for each such rank.
    """
    if device not in ("cpu", "cuda"):
        raise InvalidArgument("spawn_ranks", "device", device, "'cpu' or 'cuda'")
    if not isinstance(world_size, int) or world_size < 1:
        raise InvalidArgument("spawn_ranks", "world_size", world_size, "an int, 1 or more")
    pool = RankPool(
        world_size, env or {}, device, share_gpus, init, poison_empty, new_interpreters, timeout
    )
    return pool.run(fn, *args, timeout=timeout, grace=grace, is_last=True)
