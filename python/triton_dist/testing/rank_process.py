"""Main loop of a process that :func:`triton_dist.testing.spawn_ranks` started."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist._traceback import format_exception
from triton_dist.errors import RankFailure, original_error
from triton_dist.runtime.sharing import gpu_of, ranks_per_gpu
from triton_dist.testing.assertions import poisoned_empty

STACKS_SIGNAL = signal.SIGUSR1
"""Signal at which a rank writes the Python stacks of all threads to its ``stacks`` file."""


@dataclass(frozen=True)
class RankTask:
    """Start parameters of a rank."""

    rank: int
    environment: dict[str, str]
    device: str
    joins_world: bool
    """Initialise the default process group."""
    timeout: float
    """Time limit of the process group, in seconds."""
    stacks: str
    """File for the Python stacks of a rank that crashes or hangs."""
    poison_empty: bool
    is_new_interpreter: bool
    """The rank is not forked: at exit, Python would run the destructors of all libraries."""


@dataclass(frozen=True)
class RankCall:
    """One call of a rank."""

    environment: dict[str, str]
    pickled: bytes
    """Pickled ``(fn, args)``. Unpickle it after ``environment`` is set: this imports the module of
    ``fn``, and Triton decides at decoration whether a kernel is interpreted."""


@dataclass(frozen=True)
class Returned:
    """Pickled result of the rank's function."""

    value: bytes


def main(task: RankTask, messages: connection.Connection[Any, Any]) -> None:
    """Run the calls that ``messages`` receives, and report each by ``Returned`` or ``RankFailure``.
    The process ends after a failure, or when it receives ``None``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stacks = open(task.stacks, "w")  # noqa: SIM115  # stays open for crashes and signals
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)
    knobs.replace_environment(task.environment)
    torch.set_num_threads(1)
    failure = _failure_of(lambda: _join_world(task))
    while (call := _next_call(messages)) is not None:
        report = failure or _report(task, call)
        # Plain pickle: multiprocessing's pickler would pass tensors through files in /dev/shm.
        messages.send_bytes(pickle.dumps(report))
        if isinstance(report, RankFailure):
            sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    if task.is_new_interpreter:
        # Exit without destructors, like a forked rank. Otherwise threads of a library occasionally
        # abort the process: "terminate called without an active exception".
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _join_world(task: RankTask) -> None:
    if task.device == "cuda":
        torch.cuda.set_device(gpu_of(task.rank))
    if task.joins_world:
        has_nccl = task.device == "cuda" and ranks_per_gpu() == 1
        backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=task.timeout))
        # No rank may run, and perhaps exit, before all other ranks have connected to it.
        dist.all_reduce(torch.zeros(1))


def _next_call(messages: connection.Connection[Any, Any]) -> RankCall | None:
    try:
        call: RankCall | None = pickle.loads(messages.recv_bytes())
    except EOFError:  # the parent has exited
        return None
    return call


def _report(task: RankTask, call: RankCall) -> Returned | RankFailure:
    returned: list[bytes] = []

    def run() -> None:
        knobs.replace_environment(call.environment)
        fn, args = pickle.loads(call.pickled)
        with poisoned_empty() if task.poison_empty else nullcontext():
            returned.append(pickle.dumps(fn(*args)))

    return _failure_of(run) or Returned(returned[0])


def _failure_of(work: Callable[[], object]) -> RankFailure | None:
    try:
        work()
    except BaseException as error:  # report whatever ended the rank
        cause, message = original_error(error), str(error)
        if cause is not error:
            message = f"{cause}; then {type(error).__name__}: {message}"
        return RankFailure(type(cause).__name__, message, format_exception(error))
    return None


def _end_with_parent() -> None:
    """Exit when the parent dies, so that the rank does not wait for its peers forever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
