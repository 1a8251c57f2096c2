"""Measure tuned MoE ops with other distributions of expert ids than in their tuning.

    bash scripts/launch.sh benchmarks/bench_routing.py --op run_moe_reduce_rs --M 512,4096
    bash scripts/launch.sh --nproc_per_node=1 benchmarks/bench_routing.py --op grouped_gemm

Each op is tuned with random experts of equal probabilities. Then every config that is not pruned is
timed with each distribution (routing): interleaved, with a cold L2 cache, slowest rank. The regret
of the tuned config is its median time / the smallest median time - 1. The smallest of many noisy
medians is too small, so the result is from ``--again`` further rounds of the tuned config and the
fastest ``--best`` configs.

The second regret is that of a config tuned with the routing itself and with ``routing_skew``. The
last line of each M is the smallest regret, over all configs, that one config has under the worst of
the routings.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.shapes import layers_of, parse_numbers
from record_spaces import Recorder

from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.moe import ROUTINGS, RoutedOpInfo
from triton_dist.testing.timing import time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed

SKEWS = {"even": "even", "zipf": "zipf", "one expert": "same_experts"}
"""``routing_skew`` by routing."""
OPS = ("grouped_gemm", "ag_group_gemm", "run_moe_reduce_rs", "run_moe_reduce_ar")


def regrets(recorder: Recorder, M: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune the op at ``M`` rows and return the regret under each routing. Collective."""
    info, op, rows = recorder.info, recorder.op, []
    assert isinstance(info, RoutedOpInfo)
    shape, ranks = recorder.shape(M), dist.get_world_size()
    with info.context(shape, torch.bfloat16) as ctx:
        info.routing = "even"
        args, kwargs = info.arguments(info.operands(shape, torch.bfloat16, ranks), ctx)
        tuned = op.best_config(*args, **kwargs)
        worst: dict[int, float] = {}
        for routing in ROUTINGS:
            info.routing = routing
            args, kwargs = info.arguments(info.operands(shape, torch.bfloat16, ranks), ctx)
            with_skew = op.best_config(*args, **kwargs, routing_skew=SKEWS[routing])
            samples = recorder.samples(M, args, kwargs)
            measured = {int(i): ms for i, ms in samples.items() if isinstance(ms, list)}
            timed = {i: statistics.median(ms) for i, ms in measured.items()}
            for i, ms in timed.items():
                worst[i] = max(worst.get(i, 0.0), ms / min(timed.values()) - 1)
            winner, second = map(recorder.configs.index, (tuned, with_skew))
            best = sorted(timed, key=timed.__getitem__)[: options.best]
            calls = {
                str(i): functools.partial(op.fn, *args, **kwargs, **recorder.configs[i])
                for i in {winner, second, *best}
            }
            again = {name: s.median for name, s in time_interleaved(calls, options.again).items()}
            fastest = min(again, key=again.__getitem__)
            regret, skewed = (again[str(i)] / again[fastest] - 1 for i in (winner, second))
            rows.append({"op": op.__name__, "shape": str(shape), "routing": routing})
            rows[-1] |= {"ms": again[str(winner)], "regret": regret, "configs": len(timed)}
            rows[-1] |= {"regret with routing_skew": skewed}
            rows[-1] |= {"tuned": str(tuned), "tuned with routing_skew": str(with_skew)}
            rows[-1] |= {"fastest": str(recorder.configs[int(fastest)])}
            text = f"{regret:.1%}, with routing_skew {skewed:.1%} of {again[fastest]:.4f} ms"
            dist_print(f"{op.__name__} {shape} {routing}: {text}")
        dist_print(f"smallest regret under the worst routing: {min(worst.values()):.1%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=OPS, default="ag_group_gemm")
    parser.add_argument("--layer", default="Qwen3-30B-A3B", help="name of a model")
    parser.add_argument("--M", type=parse_numbers, default=[512, 4096], help="rows")
    parser.add_argument("--runs", type=int, default=7, help="samples of each config")
    parser.add_argument("--best", type=int, default=6, help="configs that are timed again")
    parser.add_argument("--again", type=int, default=31, help="samples of these configs")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    options.shape = layers_of(OPINFOS[options.op])[options.layer]
    initialize_distributed()
    recorder = Recorder(options)
    rows = [row for M in options.M for row in regrets(recorder, M, options)]
    dist_print(f"largest regret: {max(row['regret'] for row in rows):.1%}")
    if options.json and dist.get_rank() == 0:
        options.json.write_text(json.dumps(rows))
    finalize_distributed()


if __name__ == "__main__":
    main()
