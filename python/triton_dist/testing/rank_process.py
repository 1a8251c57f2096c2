"""What a process that :func:`triton_dist.testing.spawn_ranks` started does, from first to last."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.errors import RankFailure
from triton_dist.runtime.sharing import gpu_of, ranks_per_gpu
from triton_dist.testing.poison import poisoned_empty

STACKS_SIGNAL = signal.SIGUSR1
"""Makes a rank write the Python stacks of all its threads to its ``stacks`` file."""


@dataclass(frozen=True)
class RankTask:
    """All that a rank is told."""

    rank: int
    environment: dict[str, str]
    call: bytes
    """Pickled ``(fn, args)``. Unpickling imports the module of ``fn``, which must wait until
    ``environment`` is in place: Triton chooses to interpret or to compile at decoration."""
    device: str
    init: bool
    timeout: float
    stacks: str
    poison_empty: bool


@dataclass(frozen=True)
class Returned:
    """The report of a rank whose function returned."""

    value: bytes


def main(task: RankTask, reports: connection.Connection[Any, Any]) -> None:
    """Run the call of ``task`` and send one report: ``Returned`` or ``RankFailure``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    stacks = open(task.stacks, "w")  # noqa: SIM115  # stays open: a crash or a signal may write any time
    faulthandler.enable(stacks)
    faulthandler.register(STACKS_SIGNAL, stacks)
    knobs.replace_environment(task.environment)
    torch.set_num_threads(1)
    try:
        report: Returned | RankFailure = Returned(_run(task))
    except BaseException as error:  # whatever ended the rank is the news
        report = RankFailure(type(error).__name__, str(error), traceback.format_exc())
    # Plain pickle: multiprocessing's own would pass tensors through files in /dev/shm.
    reports.send_bytes(pickle.dumps(report))
    if isinstance(report, RankFailure):
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(task: RankTask) -> bytes:
    if task.device == "cuda":
        torch.cuda.set_device(gpu_of(task.rank))
    fn, args = pickle.loads(task.call)
    if task.init:
        has_nccl = task.device == "cuda" and ranks_per_gpu() == 1
        backend = "cpu:gloo,cuda:nccl" if has_nccl else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=task.timeout))
        # No rank runs, and perhaps ends, while another is still connecting to it.
        dist.all_reduce(torch.zeros(1))
    with poisoned_empty() if task.poison_empty else nullcontext():
        return pickle.dumps(fn(*args))


def _end_with_parent() -> None:
    """A rank whose parent was killed would wait for its peers, unseen, for ever."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
