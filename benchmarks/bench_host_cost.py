"""Measure the host time of an eager ``ag_gemm`` call, from the call to its return, and its parts.

    torchrun --nproc_per_node=4 benchmarks/bench_host_cost.py --json host_cost.json

The GPU is kept busy, so that no kernel starts while the host is timed. 8 consecutive calls (a row)
are timed, as in a model's step. The first call of each row is reported separately, because the
CPU's caches are cold. The command prints medians of the slowest rank. Before the measurement,
results are checked; their memory contained NaN.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.kernels.common.libraries import all_gather_matmul
from triton_dist.kernels.nvidia import ag_gemm, create_ag_gemm_context
from triton_dist.kernels.nvidia.allgather_gemm import algorithms
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.testing import assert_allclose
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed

_BUSY_MILLISECONDS = 3.0
_CALLS_OF_ROW = 8


def run_in_rows(step: Callable[[], Any], samples: int) -> list[list[Any]]:
    """Return the results of consecutive calls of ``step`` while the GPU is busy. Collective.

    The result is a list of ``samples`` rows, each with ``_CALLS_OF_ROW`` results.
    """
    device, ranks, rows = current_device(), group_for(None), []
    for _ in range(samples):
        device.synchronize()
        ranks.barrier("host cost")
        device.sleep_milliseconds(_BUSY_MILLISECONDS)
        rows.append([step() for _ in range(_CALLS_OF_ROW)])
    device.synchronize()
    return rows


def microseconds(call: Callable[[], Any], samples: int) -> tuple[float, float]:
    """Return median host times of ``call`` in us: of later calls, and of first calls of a row."""

    def timed() -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6

    rows = run_in_rows(timed, samples)
    return (
        statistics.median(each for row in rows for each in row[1:]),
        statistics.median(row[0] for row in rows),
    )


def parts(
    A: torch.Tensor, B: torch.Tensor, ctx: Any, config: dict[str, Any], samples: int
) -> dict[str, float]:
    """Return the median us of each step of an ``ag_gemm`` call, without first calls of a row."""
    arguments = inspect.signature(ag_gemm.fn).bind(A, B, ctx, **config)
    arguments.apply_defaults()
    values = dict(arguments.arguments)

    def timed() -> list[float]:
        marks = [time.perf_counter()]
        call = algorithms.Call(**values)
        marks.append(time.perf_counter())
        gathered = call.chosen_algorithm.start(call)
        marks.append(time.perf_counter())
        C = algorithms._empty_product(call)
        marks.append(time.perf_counter())
        call.chosen_algorithm._run_consumer(call, C, gathered)
        marks.append(time.perf_counter())
        ctx.buffer.finish(has_awaited_peers=True)
        marks.append(time.perf_counter())
        return [(last - first) * 1e6 for first, last in itertools.pairwise(marks)]

    every = [times for row in run_in_rows(timed, samples) for times in row[1:]]
    names = ("check", "transfer", "output", "consumer", "finish")
    medians = map(statistics.median, zip(*every, strict=True))
    return dict(zip(names, medians, strict=True))


def measure(M: int, N: int, K: int, samples: int) -> dict[str, float]:
    """Return microseconds of the slowest rank by name of the measurement."""
    device, rank, num_ranks = current_device(), dist.get_rank(), dist.get_world_size()
    dtype = torch.float16 if device.name == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(rank)

    def random(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * 0.1
        return values.to(dtype).to(device.torch_device)

    A, B = random(M // num_ranks, K), random(K, N // num_ranks)
    config = algorithms.ALGORITHMS.config_space()[0]
    tuned = tune.autotune([config], ag_gemm.key_fn, recover_fn=ag_gemm._hooks.recover)(ag_gemm.fn)
    times: dict[str, float] = {}

    def add(name: str, call: Callable[[], Any]) -> None:
        times[name], times[f"{name}, first"] = microseconds(call, samples)

    with create_ag_gemm_context(M, N, K, dtype, rank, num_ranks) as ctx:
        expected = all_gather_matmul(A, B)
        for _ in range(6):  # each of two slots: one call builds the launch, two calls repeat it
            poisoned = torch.full((M, N // num_ranks), float("nan"), dtype=dtype, device=A.device)
            del poisoned  # so that the next output gets its memory
            assert_allclose(ag_gemm.fn(A, B, ctx, **config), expected, rtol=2e-2, atol=2e-2)
        tuned(A, B, ctx)
        tuned(A, B, ctx)
        add("tuned call", lambda: tuned(A, B, ctx))
        add("call", lambda: ag_gemm.fn(A, B, ctx, **config))
        pushed = {**config, "num_chunks": 2}
        for _ in range(4):
            ag_gemm.fn(A, B, ctx, **pushed)
        add("call, 2 chunks", lambda: ag_gemm.fn(A, B, ctx, **pushed))
        add("key_fn", lambda: ag_gemm.key_fn(A, B, ctx))
        measured = parts(A, B, ctx, config, samples)
        times |= {f"  {name}": value for name, value in measured.items()}
        add("NCCL + matmul" if device.name == "cuda" else "gloo + matmul",
            lambda: all_gather_matmul(A, B))  # fmt: skip
    everyone = group_for(None).all_gather("host cost", list(times.values()))
    slowest = [max(each) for each in zip(*everyone, strict=True)]
    return dict(zip(times, slowest, strict=True))


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description="Measure the host time of an ag_gemm call.")
    parser.add_argument("--shape", type=int, nargs=3, default=[1024, 4096, 4096], metavar="MNK")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    initialize_distributed()
    times = measure(*options.shape, options.samples)
    facts = dict(current_device().facts())
    dist_print(f"{dist.get_world_size()} ranks, {facts['gpu']}, {options.shape}, slowest rank, us")
    for name, value in times.items():
        dist_print(f"{name:24}{value:9.1f}")
    if options.json is not None and dist.get_rank() == 0:
        report = {"hardware": facts, "ranks": dist.get_world_size(), "microseconds": times}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    finalize_distributed()
    return times


if __name__ == "__main__":
    main(sys.argv[1:])
