"""Timing a call, and tracing a region on all ranks."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

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


@contextmanager
def group_profile(
    name: str = "trace",
    do_prof: bool = True,
    group: Group = None,
    folder: str | Path = "prof",
) -> Iterator[None]:
    """Trace the region with torch's profiler on every rank of ``group``.

    Each rank writes ``<folder>/<name>/rank-<r>.json.gz``; rank 0 then writes all ranks together to
    ``<folder>/<name>_merged.json.gz``, for chrome://tracing or Perfetto. Collective when
    ``do_prof``.
    """
    if not do_prof:
        yield
        return
    with torch.profiler.profile() as profile:
        yield
        current_device().synchronize()
    group = process_group_of(group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    parts = Path(folder) / name
    parts.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(parts / f"rank-{rank}.json.gz"))
    if dist.is_initialized():
        dist.barrier(group)
    if rank == 0:
        _merge(sorted(parts.glob("rank-*.json.gz")), Path(folder) / f"{name}_merged.json.gz")


def _merge(traces: list[Path], merged: Path) -> None:
    """One trace of all ranks: a rank's processes are kept apart by its name before their ids."""
    together: dict[str, object] = {}
    events: list[dict[str, object]] = []
    for trace in traces:
        rank = trace.name.split(".")[0]
        with gzip.open(trace, "rt") as file:
            content = json.load(file)
        for event in content.pop("traceEvents"):
            if "pid" in event:
                event["pid"] = f"{rank} {event['pid']}"
            events.append(event)
        together = together or content
    with gzip.open(merged, "wt") as file:
        json.dump({**together, "traceEvents": events}, file)
