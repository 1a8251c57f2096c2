"""Lines that the test scripts print: that a check has passed, and tables of times."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.device import current_device
from triton_dist.testing.assertions import assert_allclose
from triton_dist.testing.opinfo.base import Baseline, Operands, OpInfo
from triton_dist.testing.overlap import overlap_limit
from triton_dist.testing.timing import Samples, captured, interleaved
from triton_dist.tune import AutoTuner
from triton_dist.utils import dist_print, is_cuda

NO_TIMES = "interpreted: times mean nothing, they only show that everything runs"
"""Stands above times on CPU ranks, in place of rates and ratios."""


def check_by_turns(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compare results, one rank after the other. Collective."""
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == dist.get_rank():
            assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def profile(name: str, wanted: bool, *calls: Callable[[], object]) -> None:
    """Write a trace of 20 rounds of ``calls`` to prof/, if ``wanted``. Collective."""
    with group_profile(name, wanted):
        for call in calls:
            for _ in range(20 if wanted else 0):
                call()


def report_perf(
    info: OpInfo[Any],
    ours: Callable[[], torch.Tensor],
    data: Operands,
    ctx: Any,
    args: argparse.Namespace,
    title: str,
    rounds: int,
    warmup: int,
    trace: str = "",
) -> None:
    """Time the op, its parts and its baselines in CUDA graphs; then profile it, if asked to.

    trace: name of the profile; default: that of the op.
    """
    candidates = {info.name: Baseline("own", ours), **info.baselines(data, ctx)}
    calls = {name: captured(each.call) for name, each in candidates.items()}
    samples = interleaved(calls, rounds=rounds, warmup_rounds=warmup)
    ranks = f"{args.dtype} on {dist.get_world_size()} ranks"
    report_times(f"{title} {ranks}", candidates, samples, info.serial, info.transfer)
    profile(trace or f"{info.name}_perf", args.profile, ours)


def report_passed(details: str) -> None:
    """``✅ check passed: 2 ranks, cpu, details`` on rank 0; without the mark where standard output
    cannot encode it."""
    mark = "✅ "
    try:
        mark.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        mark = ""
    ranks, device = dist.get_world_size(), current_device().name
    dist_print(f"{mark}check passed: {ranks} ranks, {device}, {details}")


def report_tuning(
    op: AutoTuner, autotune: bool, tuned_now: bool, /, *operands: Any, **options: Any
) -> None:
    """Say which config is in use and where it came from.

    Args:
        autotune: the script's own option; the environment may say no, too.
        operands, options: those of the call.
    """
    if not (autotune and knobs.autotune.get()):
        dist_print("no tuning: the default config")
        return
    origin = "tuned now" if tuned_now else "from the cache, no tuning"
    dist_print(f"config ({origin}): {op.best_config(*operands, **options)}")


def report_times(
    title: str,
    candidates: Mapping[str, Baseline],
    samples: Mapping[str, Samples],
    serial: str,
    transfer: str,
) -> None:
    """Print a table of medians, with ratios where times mean something.

    Args:
        title: op, shape and dtype, for people.
        candidates: what was timed, by name.
        samples: times of each, of the slowest rank, in ms.
        serial: the candidate that does one part after the other.
        transfer: the op's collective, for people.
    """
    if not is_cuda():
        dist_print(f"{title}\n{NO_TIMES}\n{'':32}{'ms':>10}")
        for name, sample in samples.items():
            dist_print(f"{name:32}{sample.median:10.3f}")
        return
    limit, base = overlap_limit(candidates, samples), samples[serial].median
    rounds = len(samples[serial].milliseconds)
    dist_print(f"{title}, slowest rank, cold cache, median of {rounds} interleaved rounds:")
    dist_print(f"{'':32}{'ms':>10}{'quartiles':>20}{'x serial':>10}{'/ limit':>9}")
    for name, sample in samples.items():
        quartiles = "{:.3f}-{:.3f}".format(*sample.spread)
        ratios = f"{base / sample.median:10.2f}{sample.median / limit:9.2f}"
        dist_print(f"{name:32}{sample.median:10.3f}{quartiles:>20}{ratios}")
    dist_print(f"{f'limit max(GEMM, {transfer})':32}{limit:10.3f}")
    dist_print(
        f"x serial: how many times as fast as {serial}; / limit: time over the limit, the larger "
        f"of GEMM alone and the fastest {transfer} alone"
    )
