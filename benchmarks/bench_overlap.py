"""Compare overlapped ops with their baselines and their limit, eager and in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_overlap.py --json overlap.json --png overlap.png
    bash scripts/launch.sh benchmarks/bench_overlap.py --shapes 8192:28672:8192 --mode graph
    bash scripts/launch.sh benchmarks/bench_overlap.py --layers all --M 512,2048,8192
    bash scripts/launch.sh benchmarks/bench_overlap.py --op ag_group_gemm --routing zipf
    bash scripts/launch.sh benchmarks/bench_overlap.py --dtype fp8-row --shapes 8192:29696:8192
    bash scripts/launch.sh benchmarks/bench_overlap.py --op gemm_rs --concurrent --mode graph
    scripts/python benchmarks/bench_overlap.py --from-json overlap.json --png overlap.png

For each shape the op is tuned, or its recorded config is used. The candidates are the winner, the
next best configs of the record, and the baselines. The result of each is compared with a reference,
for new random data and outputs that contained NaN. Then all are timed: interleaved, ranks aligned,
cold L2, slowest rank of each sample. The winner is timed twice, under two names, to show the
noise.

limit = max(GEMM alone, fastest transfer alone). ``--concurrent`` also times the GEMM while each
transfer runs on another stream, without dependencies. This is a tighter bound, because GEMM and
transfer share memory bandwidth and clocks. On CPU ranks, sizes are reduced.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.measuring import MODES, measure
from overlap.plot import check_matplotlib, draw
from overlap.results import report, shape_tree
from overlap.shapes import DTYPE_CHOICES, parse_layers, parse_numbers, parse_shapes
from overlap.table import console, shape_table, summary_table
from overlap.tuned_op import open_op
from overlap.workload import CandidateSelection

from triton_dist.test.utils import dtype_named
from triton_dist.testing.opinfo import OPINFOS, OVERLAPPED_OPINFOS
from triton_dist.testing.opinfo.base import OpInfo
from triton_dist.testing.opinfo.moe import ROUTINGS, RoutedOpInfo
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

_CPU_SCALE = 256
# grouped_gemm runs on one GPU and overlaps nothing, but it has baselines and a limit.
INFOS = OVERLAPPED_OPINFOS | {"grouped_gemm": OPINFOS["grouped_gemm"]}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(INFOS), default="ag_gemm")
    parser.add_argument("--shapes", help="global M:N:K,...; default: the shapes of the OpInfo")
    parser.add_argument(
        "--layers", help="names of layers, or of models for ops with experts, or all; with --M"
    )
    parser.add_argument(
        "--routing", choices=list(ROUTINGS), default="even", help="routing, for ops with experts"
    )
    parser.add_argument("--M", type=parse_numbers, default=[8192], help="rows for --layers")
    parser.add_argument("--scale", type=int, help="divide every size; default: 1, on CPU ranks 256")
    parser.add_argument("--mode", help="eager,graph; default: both, on CPU ranks eager")
    parser.add_argument("--best", type=int, default=4, help="number of further recorded configs")
    parser.add_argument(
        "--all-candidates", action="store_true", help="time all configs that are not pruned"
    )
    parser.add_argument(
        "--concurrent", action="store_true", help="also time GEMM and transfer at the same time"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_CHOICES)
    parser.add_argument("--rounds", type=int, help="default: 25, on CPU ranks 3")
    parser.add_argument("--limit", type=int, default=300, help="seconds per shape, tuning included")
    parser.add_argument("--json", type=Path, help="file for the results; rewritten at each shape")
    parser.add_argument("--png", type=Path, help="file for a plot; needs matplotlib")
    parser.add_argument("--from-json", type=Path, help="show and draw this file")
    options = parser.parse_args(arguments)
    if options.shapes is not None:
        try:
            options.shapes = parse_shapes(options.shapes, INFOS[options.op].shape_type)
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --shapes: {error}")
    if options.layers is not None:
        try:
            options.layers = parse_layers(options.layers, INFOS[options.op])
        except argparse.ArgumentTypeError as error:
            parser.error(f"argument --layers: {error}")
    unknown = [mode for mode in (options.mode or "eager").split(",") if mode not in MODES]
    if unknown:
        parser.error(f"--mode {unknown[0]!r}, expected {' or '.join(MODES)}")
    return options


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every shape. Collective. Rank 0 writes the results after each shape."""
    num_ranks = dist.get_world_size()
    scale = options.scale or (1 if is_cuda() else _CPU_SCALE)
    modes = (options.mode or ("eager,graph" if is_cuda() else "eager")).split(",")
    rounds = options.rounds or (25 if is_cuda() else 3)
    dtype = dtype_named(options.dtype)
    selection = CandidateSelection(
        options.best, options.all_candidates, concurrent=options.concurrent
    )
    trees, info = [], INFOS[options.op].with_dtype(options.dtype)
    if isinstance(info, RoutedOpInfo):
        info.routing = options.routing
    shapes = (info.smaller(each, scale, num_ranks) for each in requested_shapes(options, info))
    for shape in dict.fromkeys(shapes):
        # A rank that hangs prints its stacks to the original stderr and ends.
        faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
        trees.append(measure_shape(info, shape, dtype, selection, modes, rounds))
        faulthandler.cancel_dump_traceback_later()
        result = report(options.op, options.dtype, rounds, trees)
        if dist.get_rank() == 0:
            console().print(shape_table(trees[-1]))
            if options.json is not None:
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def measure_shape(
    info: OpInfo[Any],
    shape: Any,
    dtype: torch.dtype,
    selection: CandidateSelection,
    modes: list[str],
    rounds: int,
) -> dict[str, Any]:
    """Measure one shape; return a tree of the results."""
    with open_op(info, shape, dtype, selection) as workload:
        begin = time.perf_counter()
        rows, failures = measure(workload, modes, rounds, warmup_rounds=2 if is_cuda() else 1)
        return shape_tree(shape, workload, rows, failures, time.perf_counter() - begin)


def requested_shapes(options: argparse.Namespace, info: OpInfo[Any]) -> list[Any]:
    """Return the shapes of the command line; default: the shapes of the op's OpInfo."""
    shapes = list(options.shapes or [])
    shapes += [layer(M) for layer in options.layers or [] for M in options.M]
    return shapes or list(info.shapes)


def show(result: dict[str, Any], png: Path | None) -> None:
    if png is not None:
        draw(result, png)
    console().print(summary_table(result))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.png is not None:
        check_matplotlib()
    if options.from_json is not None:
        result = json.loads(options.from_json.read_text(encoding="utf-8"))
        for tree in result["shapes"]:
            console().print(shape_table(tree))
        show(result, options.png)
        return
    initialize_distributed()
    result = run(options)
    if dist.get_rank() == 0:
        show(result, options.png)
    finalize_distributed()


if __name__ == "__main__":
    main()
