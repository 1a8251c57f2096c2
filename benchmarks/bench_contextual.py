"""Measure the number of calls that ``contextual_autotune`` needs, and its winners' quality.

    bash scripts/launch.sh benchmarks/bench_contextual.py --json contextual.json

The tuned kernel is the GEMM of an AllGather-GEMM, which cannot be timed alone because it waits for
other ranks. It has 24 configs. It is tuned inside the op several times with an empty cache, by
measuring every config in full ("in turn") and by a race. At the end, all winners are timed
interleaved.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist import knobs
from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import LAYER_CONFIGS
from triton_dist.testing.timing import time_interleaved
from triton_dist.testing.tma_autotuned_ag_gemm import TmaAutotunedAgGemm
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
    rand_tensor,
)

_N_WARMUP, _N_REPEAT = 3, 5  # the defaults
# BLOCK_SIZE_M, _N, _K, num_warps, num_stages; all fit an H200.
_GPU_TILES = (
    (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 64, 8, 3),
    (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (64, 256, 64, 4, 4), (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 5), (64, 128, 128, 4, 4), (128, 64, 64, 4, 5), (64, 64, 64, 4, 5),
)  # fmt: skip
_CPU_TILES = tuple(
    (m, n, k, 4, 2) for m, n, k in itertools.product((16, 32), (16, 32), (16, 32, 64))
)


def configs() -> list[triton.Config]:
    return [
        triton.Config(
            {
                "BLOCK_SIZE_M": m,
                "BLOCK_SIZE_N": n,
                "BLOCK_SIZE_K": k,
                "GROUP_SIZE_M": group,
                "EPILOGUE_SUBTILE": False,
            },
            num_warps=warps,
            num_stages=stages,
        )
        for (m, n, k, warps, stages), group in itertools.product(
            _GPU_TILES if is_cuda() else _CPU_TILES, (8, 4)
        )
    ]


def tune_with_empty_cache(
    buffer: AllGatherBuffer, A: torch.Tensor, B: torch.Tensor, race: bool
) -> tuple[int, float, triton.Config]:
    """Return calls of the op, seconds, and the winner of a tuning with an empty cache."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    knobs.put("TRITON_DIST_CACHE_DIR", folder[0])
    op = TmaAutotunedAgGemm(buffer, configs(), race)
    dist.barrier()
    begin = time.perf_counter()
    op(A, B)
    seconds = time.perf_counter() - begin
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    (winner,) = op.choices().values()
    return op.num_tuning_calls + 1, seconds, winner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tunings", type=int, default=5, help="number of tunings of each kind")
    parser.add_argument("--M", type=int, help="global rows; default: 8192, on CPU ranks 64")
    parser.add_argument("--shape_id", default="LLaMA-3.1-70B", choices=list(LAYER_CONFIGS))
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()
    initialize_distributed()
    num_ranks, device = dist.get_world_size(), current_device().torch_device
    scale = 1 if is_cuda() else 128
    M = args.M or 8192 // scale
    N, K = (LAYER_CONFIGS[args.shape_id][name] // scale for name in ("N", "K"))
    A = rand_tensor([M // num_ranks, K], torch.bfloat16, device) * 0.1
    B = rand_tensor([N // num_ranks, K], torch.bfloat16, device).T
    buffer = AllGatherBuffer(M, K, torch.bfloat16, None, "bench_contextual")
    tunings: dict[str, list[tuple[int, float, str]]] = {"in turn": [], "race": []}
    winners: dict[str, triton.Config] = {}
    for name in itertools.chain.from_iterable(itertools.repeat(tuple(tunings), args.tunings)):
        calls, seconds, winner = tune_with_empty_cache(buffer, A, B, race=name == "race")
        winners[str(winner)] = winner
        tunings[name].append((calls, seconds, str(winner)))
        dist_print(f"{name}: {calls} calls, {seconds:.1f} s, {winner}")
    candidates: dict[str, Any] = {}
    for name, winner in winners.items():
        op = TmaAutotunedAgGemm(buffer, [winner])
        candidates[name] = lambda op=op: op(A, B)
    medians = {
        name: sample.median for name, sample in time_interleaved(candidates, rounds=41).items()
    }
    best = min(medians[winner] for _, _, winner in tunings["in turn"])
    max_calls = len(configs()) * (_N_WARMUP + _N_REPEAT) + 1
    for name, entries in tunings.items():
        calls, seconds = (statistics.median(entry[i] for entry in entries) for i in (0, 1))
        slowest = max(medians[winner] for _, _, winner in entries)
        dist_print(
            f"{name}: {calls:.0f} calls of at most configs * (n_warmup + n_repeat) + 1 = "
            f"{max_calls} ({calls / max_calls:.2f}), {seconds:.1f} s; slowest winner: "
            f"{slowest / best:.4f} x the time of the fastest winner in turn"
        )
    if args.json and dist.get_rank() == 0:
        facts = dict(current_device().facts())
        results = {"hardware": facts, "ranks": num_ranks, "shape": [M, N, K], "final_ms": medians}
        with open(args.json, "w") as file:
            json.dump({**results, "tunings": tunings}, file, indent=1)
    buffer.free()
    finalize_distributed()


if __name__ == "__main__":
    main()
