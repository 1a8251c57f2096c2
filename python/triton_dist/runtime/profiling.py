"""Timing a call, and tracing a region on all ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist

from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, process_group_of

T = TypeVar("T")


def perf_func(func: Callable[[], T], iters: int, warmup_iters: int) -> tuple[T, float]:
    """Mean time of back-to-back calls on this rank.

    One timed region around all ``iters`` calls after ``warmup_iters`` untimed ones, caches warm:
    the steady state. Returns the last output and the milliseconds of one call.
    """
    device = current_device()
    for _ in range(warmup_iters):
        func()
    device.synchronize()
    timer = device.timer()
    timer.start()
    for _ in range(iters):
        output = func()
    timer.stop()
    device.synchronize()
    return output, timer.milliseconds() / iters


def perf_func_with_l2_reset(
    func: Callable[[], T], iters: int, warmup_iters: int
) -> tuple[T, float]:
    """Mean time of calls on this rank, each after the last-level cache was flushed.

    Only the calls are timed. Returns the last output and the milliseconds of one call.
    """
    device = current_device()
    timers = [device.timer() for _ in range(iters)]
    for _ in range(warmup_iters):
        func()
    for timer in timers:
        device.flush_cache()
        timer.start()
        output = func()
        timer.stop()
    device.synchronize()
    return output, sum(timer.milliseconds() for timer in timers) / iters


def get_torch_prof_ctx(do_prof: bool = True) -> AbstractContextManager[Any]:
    """torch's profiler of this rank, with shapes; without ``do_prof`` nothing, as ``None``."""
    return _profile(record_shapes=True) if do_prof else nullcontext()


@contextmanager
def group_profile(
    name: str = "trace",
    do_prof: bool = True,
    group: Group = None,
    folder: str | Path = "prof",
    *,
    merge_group: bool = True,
    keep_merged_only: bool = False,
    compress: bool = True,
) -> Iterator[None]:
    """Trace the region with torch's profiler on every rank of ``group``.

    Each rank writes ``<folder>/<name>/rank-<r>.json.gz``; rank 0 then writes all ranks together to
    ``<folder>/<name>_merged.json.gz``, for chrome://tracing or Perfetto. Collective when
    ``do_prof``.

    Args:
        merge_group: ``False``: do not put the ranks together.
        keep_merged_only: remove the files of the ranks once they are together.
        compress: ``False``: write ``.json``.
    """
    if not do_prof:
        yield
        return
    with _profile() as profile:
        yield
        current_device().synchronize()
    group = process_group_of(group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    parts, ending = Path(folder) / name, "json.gz" if compress else "json"
    parts.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(parts / f"rank-{rank}.{ending}"))
    if dist.is_initialized():
        dist.barrier(group)
    if rank == 0 and merge_group:
        traces = sorted(parts.glob(f"rank-*.{ending}"))
        _merge(traces, Path(folder) / f"{name}_merged.{ending}")
        if keep_merged_only:
            for trace in traces:
                trace.unlink()
            parts.rmdir()


def _profile(record_shapes: bool = False) -> torch.profiler.profile:
    """torch's profiler for one cycle, of which all is kept anyway; without saying so, torch 2.11
    warns."""
    return torch.profiler.profile(record_shapes=record_shapes, acc_events=True)


def _merge(traces: list[Path], merged: Path) -> None:
    """One trace of all ranks: a rank's processes are kept apart by its name before their ids."""
    together: dict[str, object] = {}
    events: list[dict[str, object]] = []
    for trace in traces:
        rank = trace.name.split(".")[0]
        with _open(trace, "rt") as file:
            content = json.load(file)
        for event in content.pop("traceEvents"):
            if "pid" in event:
                event["pid"] = f"{rank} {event['pid']}"
            events.append(event)
        together = together or content
    with _open(merged, "wt") as file:
        json.dump({**together, "traceEvents": events}, file)


def _open(file: Path, mode: str) -> IO[Any]:
    opener: Callable[..., IO[Any]] = gzip.open if file.suffix == ".gz" else open
    return opener(file, mode)
