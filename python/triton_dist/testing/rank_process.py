"""The life of a process that :func:`triton_dist.testing.spawn_ranks` started."""

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
from triton_dist.errors import RankFailure, cause_of
from triton_dist.runtime.sharing import gpu_of, ranks_per_gpu
from triton_dist.testing.assertions import poisoned_empty

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write the Python stacks of all its threads to its ``stacks`` file."""


@dataclass(frozen=True)
class RankTask:
    """All that a rank is told at its start."""

    rank: int
    environment: dict[str, str]
    device: str
    init: bool
    timeout: float
    """Limit of the process group, in seconds."""
    stacks: str
    """File for stacks of a rank that crashes or is stuck."""
    poison_empty: bool
    fresh: bool
    """It is a new interpreter, which would run the destructors of all libraries at its end."""


@dataclass(frozen=True)
class RankCall:
    """One call that a rank makes."""

    environment: dict[str, str]
    call: bytes
    """Pickled ``(fn, args)``. Unpickling imports the module of ``fn``, which must wait until
    the environment is in place: Triton chooses to interpret or to compile at decoration."""


@dataclass(frozen=True)
class Returned:
    """Value of the rank's function, pickled."""

    value: bytes


def main(task: RankTask, messages: connection.Connection[Any, Any]) -> None:
    """Make the calls that come, a report after each: ``Returned`` or ``RankFailure``. ``None``, or
    a failure, is the end."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stacks = open(task.stacks, "w")  # noqa: SIM115  # stays open: a crash or a signal may write any time
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)
    knobs.replace_environment(task.environment)
    torch.set_num_threads(1)
    failure = _failure_of(lambda: _join(task))
    while (asked := _next_call(messages)) is not None:
        report = failure or _report(task, asked)
        # Plain pickle: multiprocessing's own would pass tensors through files in /dev/shm.
        messages.send_bytes(pickle.dumps(report))
        if isinstance(report, RankFailure):
            sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    if task.fresh:
        # As a forked rank ends. Threads that a library has left running abort the process else,
        # now and then: "terminate called without an active exception".
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _join(task: RankTask) -> None:
    if task.device == "cuda":
        torch.cuda.set_device(gpu_of(task.rank))
    if task.init:
        has_nccl = task.device == "cuda" and ranks_per_gpu() == 1
        backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=task.timeout))
        # No rank runs, and perhaps ends, while another is still connecting to it.
        dist.all_reduce(torch.zeros(1))


def _next_call(messages: connection.Connection[Any, Any]) -> RankCall | None:
    try:
        call: RankCall | None = pickle.loads(messages.recv_bytes())
    except EOFError:  # nobody is there to call
        return None
    return call


def _report(task: RankTask, asked: RankCall) -> Returned | RankFailure:
    returned: list[bytes] = []

    def run() -> None:
        knobs.replace_environment(asked.environment)
        fn, args = pickle.loads(asked.call)
        with poisoned_empty() if task.poison_empty else nullcontext():
            returned.append(pickle.dumps(fn(*args)))

    return _failure_of(run) or Returned(returned[0])


def _failure_of(work: Callable[[], object]) -> RankFailure | None:
    try:
        work()
    except BaseException as error:  # whatever ended the rank is the news
        cause, message = cause_of(error), str(error)
        if cause is not error:
            message = f"{cause}; then {type(error).__name__}: {message}"
        return RankFailure(type(cause).__name__, message, format_exception(error))
    return None


def _end_with_parent() -> None:
    """A rank whose parent was killed would wait for its peers, unseen, for ever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
