"""Measure the cost of first calls at new sizes near tuned sizes.

    bash scripts/launch.sh benchmarks/bench_first_calls.py --op gemm_rs --json first.json
    bash scripts/launch.sh benchmarks/bench_first_calls.py --layer Qwen2-72B --sizes 64 --seed 7

First, powers of two without a shipped record are tuned in full, into a cache of this run. Then the
op is called once at each of some random sizes (log-uniform, one per range of sizes that share a
tuning). This is done twice: in frozen mode, in which records of near sizes determine the config
without measurement, and then as in a normal program. ``host`` is the time of choosing the config,
including compilation and measurement; ``device`` is the time of all runs. Kernels that were
compiled for one size are reused by the next sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from overlap.any_m import random_sizes
from overlap.environment import environment_with
from overlap.results import software
from overlap.shapes import ALL_LAYERS
from overlap.tuned_op import tuning_cost

from triton_dist import tune
from triton_dist.errors import TuningFrozen
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import dtype_named
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

_FROZEN, _WARM_START = "TRITON_DIST_AUTOTUNE_FROZEN", "TRITON_DIST_AUTOTUNE_WARM_START_MS"
_CPU_SCALE = 256


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(GEMM_OPINFOS), default="ag_gemm")
    parser.add_argument("--layer", choices=list(ALL_LAYERS), default="llama-70b-gate-up")
    parser.add_argument("--sizes", type=int, default=64, help="number of random M")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random M")
    parser.add_argument("--most", type=int, default=16384, help="largest M")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    options.widths = ALL_LAYERS[options.layer]
    return options


class FirstCalls:
    """First calls of one op. Collective."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.info, self.options = GEMM_OPINFOS[options.op], options
        self.ranks, self.dtype = dist.get_world_size(), dtype_named(options.dtype)

    def run(self) -> list[dict[str, Any]]:
        options = self.options
        powers = [1 << n for n in range(options.most.bit_length())]
        anchors = list(dict.fromkeys(self._shape(M) for M in powers if options.most >= M))
        seen, drawn = {tune.fine_bucket(shape.M) for shape in anchors}, []
        for M in random_sizes(options.sizes, options.most, options.seed):
            shape = self._shape(M)
            if tune.fine_bucket(shape.M) not in seen:
                seen.add(tune.fine_bucket(shape.M))
                drawn.append(shape)
        with self.info.context(max(anchors, key=lambda shape: shape.M), self.dtype) as ctx:
            for shape in reversed(anchors):
                self._first(shape, ctx, **{_WARM_START: "0"})
            frozen = [self._first(shape, ctx, **{_FROZEN: "1"}) for shape in drawn]
            self.info.op.clear()  # forget the configs of the frozen calls
            return frozen + [self._first(shape, ctx) for shape in drawn]

    def _shape(self, M: int) -> Any:
        scale = 1 if is_cuda() else _CPU_SCALE
        return self.info.smaller(
            self.info.layer_shape(M * scale, *self.options.widths), scale, self.ranks
        )

    def _first(self, shape: Any, ctx: Any, **environment: str) -> dict[str, Any]:
        """Return how a first call chose its config, and the milliseconds on this rank."""
        op, frozen = self.info.op, _FROZEN in environment
        args, kwargs = self.info.arguments(self.info.operands(shape, self.dtype, self.ranks), ctx)
        with environment_with(**environment):
            begin = time.perf_counter()
            try:
                record = op.tune(*args, **kwargs)
            except TuningFrozen:
                return {"M": shape.M, "frozen": True, "how": "refused"}
            took = time.perf_counter() - begin
            config = op.best_config(*args, **kwargs)
        cost = tuning_cost(record, took)
        if frozen:
            del cost["device"]  # nothing ran
        how = record.warm_started_from or "in full"
        return {
            "M": shape.M,
            "frozen": frozen,
            "how": how,
            **cost,
            "own": self.info.is_our_algorithm(config),
        }


def summary(calls: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each method by which configs were chosen."""
    algorithms: dict[str, list[dict[str, Any]]] = {}
    for call in calls:
        how = call["how"].split(" from ")[0]
        algorithms.setdefault(f"frozen, {how}" if call["frozen"] else how, []).append(call)
    lines = []
    for algorithm, found in algorithms.items():
        line = f"{algorithm}: {len(found)} sizes"
        for name in ("host", "device"):
            times = [call[name] for call in found if name in call]
            if times:
                line += f", {name} {statistics.median(times):.1f} ms, at most {max(times):.1f}"
        if "own" in found[0]:
            line += f", our algorithm at {sum(call['own'] for call in found) / len(found):.0%}"
        lines.append(line)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]  # the folder of rank 0
        dist.broadcast_object_list(shared, 0)
        with environment_with(TRITON_DIST_CACHE_DIR=shared[0]):
            calls = FirstCalls(options).run()
        dist.barrier()
    dist_print(f"{options.op}, {options.layer}: {dist.get_world_size()} ranks")
    dist_print("\n".join(summary(calls)))
    if options.json is not None and dist.get_rank() == 0:
        tree = {
            "benchmark": "first calls", "op": options.op, "layer": options.layer,
            "hardware": dict(current_device().facts()), "software": software(), "calls": calls,
        }  # fmt: skip
        options.json.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    finalize_distributed()


if __name__ == "__main__":
    main()
