"""Measure the time of a tuning of AllGather-GEMM with empty caches, and its winners' quality.

    bash scripts/launch.sh benchmarks/bench_cold_tuning.py --json cold.json     # on GPUs

The space has 96 candidates: 24 kernels with 4 transfer schedules each. They are first tuned as by a
simple tuner: compile a config, run it 5 times untimed and 10 times timed, continue with the next.
Then ``tune.autotune`` tunes several times, each time with empty caches (Triton's and the tuner's).
At the end, all winners and the six best configs of the serial tuning are timed interleaved. The
result is the number of winners within 1 % of the fastest.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist import knobs, tune
from triton_dist._tuning.values import Config
from triton_dist.kernels.common.gemm.sharded import kernel_gemm_persistent
from triton_dist.kernels.nvidia import AllGatherMethod, ag_gemm, create_ag_gemm_context
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import LAYER_CONFIGS
from triton_dist.testing.timing import time_interleaved
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    rand_tensor,
)

_SCHEDULES = (
    (AllGatherMethod.FULL_MESH_PUSH, 1, 1),
    (AllGatherMethod.FULL_MESH_PUSH, 1, 2),
    (AllGatherMethod.FULL_MESH_PUSH, 2, 2),
    (AllGatherMethod.RING_PUSH_1D, 1, 1),
)
# BLOCK_SIZE_M, _N, _K, num_warps, num_stages, EPILOGUE_SUBTILE; all fit an H200 without spills.
_TILES = (
    (128, 256, 64, 8, 3, False),
    (128, 256, 64, 8, 4, True),
    (256, 128, 64, 8, 3, False),
    (256, 128, 64, 8, 4, True),
    (128, 128, 64, 8, 4, False),
    (128, 128, 64, 8, 3, False),
    (128, 128, 64, 4, 4, False),
    (128, 128, 128, 8, 3, True),
    (64, 256, 64, 4, 4, False),
    (64, 256, 64, 8, 4, True),
    (64, 128, 64, 4, 5, False),
    (64, 128, 128, 4, 4, False),
)


def space() -> list[dict[str, Any]]:
    tiles = [
        triton.Config(
            {
                "BLOCK_SIZE_M": m,
                "BLOCK_SIZE_N": n,
                "BLOCK_SIZE_K": k,
                "GROUP_SIZE_M": group,
                "EPILOGUE_SUBTILE": subtile,
            },
            num_warps=warps,
            num_stages=stages,
        )
        for group in (8, 4)
        for m, n, k, warps, stages, subtile in _TILES
    ]
    return [
        {
            "gemm_config": tile,
            "persistent": True,
            "algorithm": method.value,
            "num_streams": streams,
            "num_chunks": chunks,
        }
        for tile, (method, streams, chunks) in itertools.product(tiles, _SCHEDULES)
    ]


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Context manager without compiled kernels (in memory and on disk) and records. Collective."""
    folder = [tempfile.mkdtemp(prefix="cold-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    knobs.put("TRITON_CACHE_DIR", f"{folder[0]}/triton")
    knobs.put("TRITON_DIST_CACHE_DIR", f"{folder[0]}/tuner")
    kernel_gemm_persistent.device_caches.clear()
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])


def tune_serially(A: torch.Tensor, B: torch.Tensor, ctx: Any) -> tuple[float, list[float]]:
    """Return the seconds of a serial tuning, and each candidate's ms on the slowest rank."""
    device = current_device()
    results = []
    with empty_caches():
        begin = time.perf_counter()
        for config in space():
            try:
                ag_gemm.fn(A, B, ctx, **config)
                for _ in range(5):
                    ag_gemm.fn(A, B, ctx, **config)
                timer = device.timer()
                dist.barrier()
                timer.start()
                for _ in range(10):
                    ag_gemm.fn(A, B, ctx, **config)
                timer.stop()
                device.synchronize()
                milliseconds = timer.milliseconds() / 10
            except triton.runtime.errors.OutOfResources:
                milliseconds = float("inf")
            slowest = torch.tensor([milliseconds])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            results.append(slowest.item())
        seconds = time.perf_counter() - begin
    return seconds, results


def tune_with_empty_caches(A: torch.Tensor, B: torch.Tensor, ctx: Any) -> tuple[float, Config]:
    """Return the seconds of a tuning with empty caches, and its winner."""
    with empty_caches():
        tuner = tune.autotune(
            space, ag_gemm.key_fn, ag_gemm.prune_fn,
            prepare_fn=ag_gemm._hooks.prepare, recover_fn=ag_gemm._hooks.recover,
        )(ag_gemm.fn)  # fmt: skip
        dist.barrier()
        begin = time.perf_counter()
        tuner.tune(A, B, ctx)
        seconds = time.perf_counter() - begin
        return seconds, tuner.best_config(A, B, ctx)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tunings", type=int, default=10, help="number of tunings")
    parser.add_argument("--M", type=int, default=8192, help="rows over all ranks")
    parser.add_argument("--shape_id", default="LLaMA-3.1-70B", choices=list(LAYER_CONFIGS))
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    initialize_distributed()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    N, K = LAYER_CONFIGS[args.shape_id]["N"], LAYER_CONFIGS[args.shape_id]["K"]
    device = current_device().torch_device
    A = rand_tensor([args.M // num_ranks, K], torch.bfloat16, device) * 0.1
    B = rand_tensor([N // num_ranks, K], torch.bfloat16, device).T
    with create_ag_gemm_context(args.M, N, K, torch.bfloat16, rank, num_ranks) as ctx:
        ag_gemm.fn(A, B, ctx, **space()[0])  # exclude the process-wide set-up of Triton
        serial_seconds, serial = tune_serially(A, B, ctx)
        dist_print(
            f"serial tuning: {serial_seconds:.1f} s for {len(serial)} candidates, each compiled, "
            "run 5 times untimed and 10 times timed"
        )
        tunings = []
        for number in range(args.tunings):
            seconds, winner = tune_with_empty_caches(A, B, ctx)
            tunings.append((seconds, winner))
            dist_print(f"cold tuning {number + 1}: {seconds:.2f} s, {winner}")
        fastest = sorted(range(len(serial)), key=serial.__getitem__)[:6]
        finalists = {str(Config(space()[i])): space()[i] for i in fastest}
        finalists |= {str(winner): winner.arguments() for _, winner in tunings}
        samples = time_interleaved(
            {
                name: lambda c=config: ag_gemm.fn(A, B, ctx, **c)
                for name, config in finalists.items()
            },
            rounds=41,
        )
    medians = {name: sample.median for name, sample in samples.items()}
    best = min(medians.values())
    num_within = sum(medians[str(winner)] <= 1.01 * best for _, winner in tunings)
    seconds = statistics.median(took for took, _ in tunings)
    for name, median in sorted(medians.items(), key=lambda entry: entry[1]):
        num_wins = sum(str(winner) == name for _, winner in tunings)
        dist_print(
            f"{median:.4f} ms, {median / best:.4f} of the best, won {num_wins} times: {name}"
        )
    dist_print(
        f"cold tuning: {seconds:.2f} s (median of {args.tunings}), "
        f"{seconds / serial_seconds:.3f} of serial; {num_within} of {args.tunings} winners "
        "within 1 % of the best"
    )
    if args.json and rank == 0:
        with open(args.json, "w") as file:
            json.dump(
                {
                    "hardware": dict(current_device().facts()),
                    "ranks": num_ranks,
                    "shape": [args.M, N, K],
                    "serial_seconds": serial_seconds,
                    "tunings": [(took, str(winner)) for took, winner in tunings],
                    "final_ms": medians,
                },
                file,
                indent=1,
            )
    finalize_distributed()


if __name__ == "__main__":
    main()
