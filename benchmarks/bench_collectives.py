"""Compare all-reduce, reduce-scatter and all-gather with NCCL, eager and in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_collectives.py --json collectives.json
    bash scripts/launch.sh benchmarks/bench_collectives.py --ops all_reduce --sizes 16K,64K,1M
    scripts/python benchmarks/bench_collectives.py --from-json collectives.json

For each size, the op is tuned or its recorded config is used. The candidates are the winner, the
best recorded config of each algorithm, the library's collective and, for all-reduce, PyTorch's
all-reduces in symmetric memory. Each result is compared with a sum in fp32. Then all candidates are
timed: interleaved, ranks aligned, cold L2, slowest rank of each sample. The winner is timed twice,
under two names, to show the noise.

With --calls 20 a sample covers 20 consecutive calls, in graph mode in one graph. The launch of the
graph and the skew between ranks then add only a twentieth to the time per call. A size is the bytes
of a rank's input or, for an all-gather, of its result. On CPU ranks, sizes are reduced.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from overlap.measuring import MODES, Row, measure
from overlap.results import environment, software
from overlap.table import console
from overlap.tuned_op import open_op
from overlap.workload import TUNED, TUNED_AGAIN, CandidateSelection
from rich.table import Table

from triton_dist.runtime.device import current_device
from triton_dist.test.utils import TIMES_NOT_MEANINGFUL, dtype_named
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.collectives import (
    IN_PLACE,
    LIBRARY,
    CollectiveOpInfo,
    CollectiveSize,
)
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

_CPU_SCALE = 1024


def _collectives() -> dict[str, CollectiveOpInfo]:
    """Return the OpInfos of the collectives by name, the most expensive collective first."""
    found = [info for info in OPINFOS.values() if isinstance(info, CollectiveOpInfo)]
    costs = {info.name: info.cost(CollectiveSize(1 << 20), torch.bfloat16, 2) for info in found}
    found.sort(key=lambda info: -costs[info.name].read_bytes - costs[info.name].link_bytes)
    return {info.name: info for info in found}


INFOS = _collectives()
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_LEGEND = (
    "A/A: difference of two measurements of the winner; smaller differences are noise. x library, "
    "x baseline: speed-up over the library, and over the fastest baseline."
)
Tree = dict[str, Any]


def parse_sizes(text: str) -> list[int]:
    """Parse ``16K,1M`` for argparse."""
    found = [re.fullmatch(r"(\d+)([KM]?)", each) for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 16K,1M")
    return [int(each[1]) * _UNITS[each[2]] for each in found if each]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(INFOS), help="some of: %(default)s")
    parser.add_argument(
        "--sizes", type=parse_sizes, help="16K,1M,…; default: powers of two from 16K to 256M"
    )
    parser.add_argument(
        "--scale", type=int, help="divide every size; default: 1, on CPU ranks 1024"
    )
    parser.add_argument("--mode", help="eager,graph; default: both, on CPU ranks eager")
    parser.add_argument("--best", type=int, default=1, help="number of configs of each algorithm")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, help="default: 25, on CPU ranks 3")
    parser.add_argument("--calls", type=int, default=1, help="consecutive calls per sample")
    parser.add_argument("--limit", type=int, default=300, help="seconds per size, tuning included")
    parser.add_argument("--json", type=Path, help="file for the results; rewritten at each size")
    parser.add_argument("--from-json", type=Path, help="show this file")
    options = parser.parse_args(arguments)
    for name, known in (("ops", INFOS), ("mode", MODES)):
        unknown = set((getattr(options, name) or "eager").split(",")) - {*known, "eager"}
        if unknown:
            parser.error(f"--{name} {unknown.pop()!r}, expected some of {', '.join(known)}")
    return options


def run(options: argparse.Namespace) -> Tree:
    """Measure every op and size. Collective. Rank 0 writes the results after each size."""
    modes = (options.mode or ("eager,graph" if is_cuda() else "eager")).split(",")
    rounds = options.rounds or (25 if is_cuda() else 3)
    scale = options.scale or (1 if is_cuda() else _CPU_SCALE)
    result: Tree = {
        "benchmark": "collectives",
        "dtype": options.dtype,
        "rounds": rounds,
        "calls": options.calls,
        "command": sys.argv,
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "hardware": {**current_device().facts(), "ranks": str(dist.get_world_size())},
        "software": software(),
        "environment": environment(),
        "sizes": [],
    }
    selection = CandidateSelection(options.best, per_algorithm=True)
    num_ranks = dist.get_world_size()
    for op in options.ops.split(","):
        info = INFOS[op]
        sizes = info.shapes if options.sizes is None else map(CollectiveSize, options.sizes)
        for size in dict.fromkeys(info.smaller(each, scale, num_ranks) for each in sizes):
            # A rank that hangs prints its stacks to the original stderr and ends.
            faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
            begin = time.perf_counter()
            with open_op(info, size, dtype_named(options.dtype), selection) as work:
                rows, failures = measure(
                    work, modes, rounds, 2 if is_cuda() else 1, num_calls=options.calls
                )
                seconds = time.perf_counter() - begin
                tree = {
                    "op": op, "bytes": size.nbytes, "tuning": work.note,
                    "seconds": round(seconds, 2),
                    "rows": [_row_tree(row) for row in rows], "failures": failures,
                }  # fmt: skip
                del rows
            faulthandler.cancel_dump_traceback_later()
            result["sizes"].append(tree)
            if dist.get_rank() == 0:
                print(
                    f"{op} {size.nbytes}: {seconds:.1f} s, {work.note} {failures or ''}", flush=True
                )
                if options.json is not None:
                    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


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


def tables(result: Tree) -> Iterator[Table]:
    """Yield a table for each op and mode, with a line per size, in microseconds."""
    cases = {(tree["op"], row["mode"]) for tree in result["sizes"] for row in tree["rows"]}
    for op, mode in sorted(cases):
        trees = [tree for tree in result["sizes"] if tree["op"] == op]
        names = list(
            dict.fromkeys(
                row["name"]
                for tree in trees
                for row in tree["rows"]
                if row["mode"] == mode and row["name"] not in (TUNED, TUNED_AGAIN)
            )
        )
        hardware = result["hardware"]
        table = Table(
            title=f"{op}, {mode}, {result['dtype']}, {hardware['ranks']} ranks, {hardware['gpu']}: "
            f"us, slowest rank, medians of {result['rounds']} interleaved rounds"
            + (f" of {result['calls']} calls each" if result["calls"] > 1 else ""),
            title_justify="left",
            caption=_LEGEND if "interpreter" not in hardware["gpu"] else TIMES_NOT_MEANINGFUL,
            caption_justify="left",
        )
        for name in ("bytes", TUNED, "A/A", "x library", "x baseline", *names):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("winner", overflow="fold")
        for tree in trees:
            table.add_row(*_cells(tree, mode, names))
        yield table


def _cells(tree: Tree, mode: str, names: Sequence[str]) -> list[str]:
    rows = {row["name"]: row for row in tree["rows"] if row["mode"] == mode}
    times = {name: row["median"] * 1e3 for name, row in rows.items()}
    tuned = times.get(TUNED)
    baselines = [times[name] for name, row in rows.items() if row["kind"] == "baseline"]
    libraries = [times[name] for name in (LIBRARY, IN_PLACE) if name in times]

    def us_text(time: float | None) -> str:
        return "" if time is None else f"{time:.1f}"

    def speed_up_over(others: Sequence[float]) -> str:
        return f"{min(others) / tuned:.2f}" if tuned and others else ""

    again = times.get(TUNED_AGAIN)
    band = f"{abs(tuned / again - 1):.1%}" if tuned and again else ""
    config = re.sub(r"\w+Method\.|[{}']", "", rows[TUNED]["config"]) if TUNED in rows else "failed"
    return [
        str(tree["bytes"]), us_text(tuned), band, speed_up_over(libraries),
        speed_up_over(baselines), *(us_text(times.get(name)) for name in names), config,
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if options.from_json is not None:
        console().print(*tables(json.loads(options.from_json.read_text(encoding="utf-8"))))
        return
    initialize_distributed()
    result = run(options)
    if dist.get_rank() == 0:
        console().print(*tables(result))
    finalize_distributed()


if __name__ == "__main__":
    main()
