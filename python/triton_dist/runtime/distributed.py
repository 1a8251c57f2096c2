"""Start and end a distributed program, and print from its ranks."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist._traceback import fold_uncaught
from triton_dist.errors import DeviceUnavailable
from triton_dist.runtime.compiling import shipped
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.location import RankLocation, sharing_error
from triton_dist.runtime.random import init_seed
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.sharing import gpu_of, ranks_per_gpu
from triton_dist.runtime.triton_compat import is_interpreting

_TIMEOUT = datetime.timedelta(minutes=5)


def initialize_distributed(
    seed: int | None = None, initialize_shmem: bool = True
) -> dist.ProcessGroup:
    """Initialise ``torch.distributed`` from the launcher's variables (RANK, WORLD_SIZE, …).

    With GPUs, this rank's GPU becomes the current device; CPU tensors use gloo and GPU tensors
    NCCL. Without GPUs, or if ranks share GPUs (which NCCL rejects), only gloo is used. A process
    without a launcher becomes a world of size 1. A second call returns the same group. The first
    call also makes Python fold tracebacks of uncaught exceptions (``TRITON_DIST_TRACEBACK``).

    Args:
        seed: seed for ``init_seed``; default: the rank.
        initialize_shmem: ignored (for existing scripts); symmetric memory needs no initialisation.

    Returns:
        The group of all ranks.

    Raises:
        DeviceUnavailable: there are fewer GPUs than ranks on this host, and sharing GPUs was not
            requested or is not possible; or there is no GPU and kernels are not interpreted.
    """
    fold_uncaught()
    shipped.install()
    shipped.start_background_jobs()
    if not dist.is_initialized():
        _join_world()
    init_seed(dist.get_rank() if seed is None else seed)
    world = dist.group.WORLD
    assert world is not None
    return world


def init_nvshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    """Prepare the ranks of ``pg`` if the program did not call ``initialize_distributed``.

    Collective over ``pg``. NVSHMEM is not used; existing scripts call this name.
    """
    fold_uncaught()
    shipped.install()
    shipped.start_background_jobs()
    group_for(pg).barrier("init_nvshmem_by_torch_process_group")


def _join_world() -> None:
    on_gpu, is_shared = current_device().name == "cuda", ranks_per_gpu() > 1
    gpu = gpu_of(knobs.local_rank.get())
    options: dict[str, Any] = {"backend": "gloo"}
    if on_gpu:
        if gpu >= torch.cuda.device_count():
            raise DeviceUnavailable(
                f"cuda:{gpu}",
                f"this host has {torch.cuda.device_count()} GPU(s)",
                "Start at most one rank per GPU; or let ranks share GPUs: launch.sh --share-gpus, "
                "which sets TRITON_DIST_SHARE_GPUS=1.",
            )
        if not is_shared:
            torch.cuda.set_device(gpu)
            options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda", gpu)}
    else:
        if not is_interpreting():
            raise DeviceUnavailable(
                "cpu",
                "kernels were not decorated for Triton's interpreter",
                "Set TRITON_INTERPRET=1 before importing kernels, as scripts/launch.sh does.",
            )
    if not knobs.is_set("RANK"):
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(timeout=_TIMEOUT, **options)
    if on_gpu and is_shared:
        try:
            _use_shared_gpu(gpu)
        except BaseException:
            dist.destroy_process_group()
            raise


def _use_shared_gpu(gpu: int) -> None:
    """Make ``gpu``, which other ranks use too, the current device. Collective."""
    ranks = group_for()
    locations = ranks.all_gather("GPUs of the ranks", RankLocation.of(gpu))
    for machine in sorted({location.machine for location in locations}):
        ranks_here = [
            rank for rank, location in enumerate(locations) if location.machine == machine
        ]
        names = [ranks.global_rank(rank) for rank in ranks_here]
        sharing_failure = sharing_error([locations[rank] for rank in ranks_here], names.__getitem__)
        if sharing_failure is not None:
            raise sharing_failure
    own_failure = ""
    try:
        _set_current_gpu(gpu)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        own_failure = str(error).partition("\n")[0]
    for rank, failure in enumerate(ranks.all_gather("ranks use their shared GPUs", own_failure)):
        if failure:
            raise DeviceUnavailable(
                f"cuda:{gpu}",
                f"rank {ranks.global_rank(rank)} cannot use its shared GPU: {failure}",
                "Start fewer ranks: each needs about 0.5 GB before it allocates anything.",
            )


def _set_current_gpu(gpu: int) -> None:
    """Make ``gpu`` the current device and create its context."""
    torch.cuda.set_device(gpu)
    torch.zeros(1, device="cuda")


def finalize_distributed() -> None:
    """Wait for all ranks, then destroy all process groups.

    Does not wait while an exception is handled, for example in ``finally``. Other ranks may never
    arrive, and the wait would hide the exception until the process group's timeout.
    """
    if dist.is_initialized():
        if sys.exc_info()[0] is None:
            current_device().synchronize()
            dist.barrier()
        dist.destroy_process_group()


def barrier_all_on_stream(stream: torch.cuda.Stream | None = None) -> None:
    """Make later work of ``stream`` wait until all ranks have reached this barrier.

    If the default process group has a backend for GPU tensors, the barrier is queued on ``stream``
    (default: the current stream) and does not block the host. Otherwise the host waits for the
    stream and for all ranks. Without process groups, this does nothing.
    """
    if not dist.is_initialized():
        return
    device = current_device()
    if device.name != "cuda":
        dist.barrier()
        return
    with torch.cuda.stream(stream):
        if "cuda" in dist.get_backend_config():
            dist.all_reduce(torch.zeros(1, device=device.torch_device))
        else:
            torch.cuda.current_stream().synchronize()
            dist.barrier()


def dist_print(
    *values: object,
    need_sync: bool = False,
    allowed_ranks: Sequence[int] | str = (0,),
    prefix: bool = False,
    **options: Any,
) -> None:
    """Call ``print`` on some ranks.

    Before ``torch.distributed`` is initialised, ranks are read from the launcher's variables, and
    ranks print in any order.

    Args:
        *values: objects to print.
        need_sync: print in rank order. Every rank must then call this function.
        allowed_ranks: the ranks that print, or ``"all"``.
        prefix: begin each output with the rank.
        **options: passed to ``print``.
    """
    is_initialized = dist.is_initialized()
    rank = dist.get_rank() if is_initialized else knobs.rank.get()
    world_size = dist.get_world_size() if is_initialized else knobs.world_size.get()
    ranks = range(world_size) if allowed_ranks == "all" else allowed_ranks
    first_values = (f"[rank {rank}]",) if prefix else ()
    options.setdefault("flush", True)
    if not need_sync:
        if rank in ranks:
            print(*first_values, *values, **options)
        return
    for turn in range(world_size):
        if turn == rank and rank in ranks:
            print(*first_values, *values, **options)
        if dist.is_initialized():
            dist.barrier()
