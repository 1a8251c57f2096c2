"""Measure the rate of compiling candidates, and how compilation delays another thread.

    python benchmarks/bench_compile.py --json compile.json     # needs no GPU

The tile configs of the persistent GEMM are compiled for an H200 by threads of this process, and by
the processes that the tuner uses. Meanwhile another thread repeatedly sleeps for 0.5 ms, like a
tuner that waits for samples. The time by which its sleeps end late shows how much compilation
disturbs a tuner.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton

from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.sharded import kernel_gemm_persistent
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES
from triton_dist.runtime.compiling import CompilePool
from triton_dist.runtime.launch import Launch
from triton_dist.testing.compile_only import install

_SLEEP_SECONDS = 0.5e-3


def launch_of(config: triton.Config) -> Launch:
    """Return the launch of an [8192, 8192] x [8192, 7168] GEMM in fp16 with ``config``."""
    a, b, c = (
        torch.empty(shape, dtype=torch.float16, device="meta")
        for shape in ((8192, 8192), (8192, 7168), (8192, 7168))
    )
    return sharded_gemm(a, b, c, config, num_sms=132, persistent=True)


def compile_by_threads(launches: Sequence[Launch], workers: int) -> None:
    def compile_launch(each: Launch) -> None:
        each.kernel.warmup(*each.args, grid=each.grid, **each.options)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(compile_launch, launches))


def compile_by_processes(launches: Sequence[Launch], workers: int) -> None:
    """Compile with about ``workers`` of the processes that the tuner uses."""
    pool = CompilePool()
    kernels = [kernel for each in launches for kernel in pool.collect(each.compile)]
    pool.begin(kernels, max(1, len(os.sched_getaffinity(0)) // workers))
    for kernel in kernels:
        pool.wait(kernel)
    pool.close()


def measure(compile_all: Callable[[Sequence[Launch], int], None], workers: int) -> dict[str, float]:
    """Compile all configs with an empty cache; return the rate, and delays of the other thread."""
    kernel_gemm_persistent.device_caches.clear()
    launches = [launch_of(config) for config in PERSISTENT_TILES]
    delays: list[float] = []
    done = threading.Event()

    def sleep_repeatedly() -> None:
        while not done.is_set():
            begin = time.perf_counter()
            time.sleep(_SLEEP_SECONDS)
            delays.append(time.perf_counter() - begin - _SLEEP_SECONDS)

    sleeper = threading.Thread(target=sleep_repeatedly)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        os.environ["TRITON_CACHE_DIR"] = folder
        sleeper.start()
        begin = time.perf_counter()
        compile_all(launches, workers)
        seconds = time.perf_counter() - begin
        done.set()
        sleeper.join()
    delays.sort()
    return {
        "configs_per_second": len(launches) / seconds,
        "late_ms_p99": delays[len(delays) * 99 // 100] * 1e3,
        "late_ms_max": delays[-1] * 1e3,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Measure the rate of compiling candidates.")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[1, 2], help="numbers of threads or processes"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    install(90)
    results = {}
    for compile_all in (compile_by_threads, compile_by_processes):
        for workers in options.workers:
            name = f"{workers} {compile_all.__name__.removeprefix('compile_by_')}"
            found = results[name] = measure(compile_all, workers)
            print(
                f"{name:14}{found['configs_per_second']:7.2f} configs/s, a sleep ends late by "
                f"{found['late_ms_p99']:.1f} ms (p99), {found['late_ms_max']:.1f} ms (maximum)"
            )
    hardware = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    report = {"hardware": hardware, "triton": triton.__version__, "results": results}
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    main()
