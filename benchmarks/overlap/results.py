"""Convert results to a tree of dicts and lists for JSON. Tables and plots read this tree."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak
from triton_dist.testing.overlap import overlap_limit_ms

from .measuring import Row
from .workload import BEST_BASELINE, TUNED, TUNED_AGAIN, Workload

Tree = dict[str, Any]


def report(op: str, dtype: str, rounds: int, shapes: Sequence[Tree]) -> Tree:
    """Return the results of one run."""
    return {
        "benchmark": "overlap",
        "op": op,
        "dtype": dtype,
        "rounds": rounds,
        "command": sys.argv,
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": {**current_device().facts(), "ranks": str(dist.get_world_size())},
        "software": software(),
        "environment": environment(),
        "shapes": list(shapes),
    }


def software() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }
    if current_device().name == "cuda":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def environment() -> dict[str, str]:
    """Return the environment variables that can affect measured times."""
    prefixes = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_", "TORCH_", "TRITON_")
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefixes)}


def shape_tree(
    shape: Any, workload: Workload, rows: Sequence[Row], failures: Mapping[str, str], seconds: float
) -> Tree:
    """Return the results of one shape: rows with samples, errors by name, a summary per mode."""
    modes = dict.fromkeys(row.mode for row in rows)
    on_gpu = current_device().name == "cuda"
    return {
        **vars(shape),
        "shape": str(shape),
        "limit_at_peaks": workload.cost.limit_ms(device_peak()) if on_gpu else None,
        "tuning": workload.note,
        "seconds": round(seconds, 2),
        "serial": workload.serial,
        "rows": [_row_tree(row) for row in rows],
        "failures": dict(failures),
        "modes": {
            mode: _summary([row for row in rows if row.mode == mode], workload.serial)
            for mode in modes
        },
    }


def _row_tree(row: Row) -> Tree:
    return {
        "name": row.name,
        "kind": row.candidate.kind,
        "mode": row.mode,
        "config": row.candidate.config,
        "median": row.samples.median,
        "p10": row.samples.quantile(0.1),
        "p90": row.samples.quantile(0.9),
        "milliseconds": list(row.samples.milliseconds),
    }


def _summary(rows: Sequence[Row], serial: str) -> Tree:
    """Return the summary of the rows of one mode, without entries that need a failed candidate."""
    by_name = {row.name: row for row in rows}
    medians = {row.name: row.samples.median for row in rows}
    summary: Tree = {}
    kinds = {row.candidate.kind for row in rows}
    if {"gemm", "transfer"} <= kinds:
        summary["limit"] = overlap_limit_ms(
            {name: row.candidate for name, row in by_name.items()},
            {name: row.samples for name, row in by_name.items()},
        )
    if TUNED in by_name:
        summary["winner"] = by_name[TUNED].candidate.kind
    own = [
        name
        for name, row in by_name.items()
        if row.candidate.kind == "own"
        and name != TUNED_AGAIN  # the minimum of two measurements would favour the winner
    ]
    if own:
        summary["best_own"] = min(own, key=medians.__getitem__)
    baselines = [name for name, row in by_name.items() if row.candidate.kind == "baseline"]
    if baselines:
        summary[BEST_BASELINE] = min(baselines, key=medians.__getitem__)
    if TUNED in medians and TUNED_AGAIN in medians:
        summary["band"] = abs(medians[TUNED] / medians[TUNED_AGAIN] - 1)
    return summary
