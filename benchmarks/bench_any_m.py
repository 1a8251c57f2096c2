"""Compare a tuned op with library implementations at random numbers of rows, M.

    scripts/python benchmarks/bench_any_m.py --op gemm_rs --layer llama-70b-gate-up --M-random 64
    scripts/python benchmarks/bench_any_m.py --op ag_gemm --bounds 20 --regret 8 --json any.json
    scripts/python benchmarks/bench_any_m.py --dtype fp8-row --layer Qwen2-72B --M-random 40
    scripts/python benchmarks/bench_any_m.py --from-json any.json --png any.png

M is drawn log-uniformly from 1 to --most. All M of a range share a tuning; for each upper bound b
of a range, b - 1 to b + 2 are measured too. At each M, the tuned op and its baselines are checked
on new random data with NaN-filled outputs, then timed in CUDA graphs: interleaved, cold L2, slowest
rank. --limit also times the GEMM alone and the transfer alone, which doubles the time.

The first pass measures all points. The second pass repeats points at which the op has less than
0.98 of the best baseline's speed, in new processes with four times the samples. Such a point counts
as slower unless the 95 % interval of the ratio contains 0.98. With --json, every point is written
immediately, and the same command resumes. Under ``launch.sh`` or torchrun, only the first pass
runs, or with --again only the second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from overlap.any_m import MIN_RATIO, draw, make_point, near_bounds, progress, random_sizes, summary
from overlap.environment import environment_with
from overlap.measuring import Row, measure
from overlap.plot import check_matplotlib
from overlap.results import environment, software
from overlap.shapes import DTYPE_CHOICES, parse_layer, parse_numbers
from overlap.tuned_op import TunedOp
from overlap.workload import TUNED, TUNED_AGAIN, CandidateSelection

from triton_dist.runtime.device import current_device
from triton_dist.test.utils import dtype_named
from triton_dist.testing.opinfo import GEMM_OPINFOS
from triton_dist.testing.opinfo.base import Baseline
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

ROOT = Path(__file__).parents[1]

_CPU_SCALE = 256
_REGRET = "best of all"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", choices=list(GEMM_OPINFOS), default="ag_gemm")
    parser.add_argument("--layer", default="llama-70b-gate-up", help="name of a layer, or N:K")
    parser.add_argument("--M", type=parse_numbers, default=[], help="further values of M")
    parser.add_argument("--M-random", type=int, default=64, metavar="N", help="number of random M")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random M")
    parser.add_argument(
        "--bounds", type=int, metavar="N", help="number of bounds of ranges; default: all"
    )
    parser.add_argument("--most", type=int, default=16384, help="largest M")
    parser.add_argument("--regret", type=int, default=0, metavar="N", help="tune N points in full")
    parser.add_argument("--limit", action="store_true", help="also time the limit")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPE_CHOICES)
    parser.add_argument("--rounds", type=int, default=15, help="samples of each candidate")
    parser.add_argument("--minutes", type=float, help="start no point after this time")
    parser.add_argument("--json", type=Path, help="file for the results; resumed")
    parser.add_argument("--png", type=Path, help="file for a plot; needs matplotlib")
    parser.add_argument("--from-json", type=Path, help="show and draw this file")
    parser.add_argument("--again", action="store_true", help="run only the second pass")
    options = parser.parse_args(arguments)
    try:
        options.sizes = parse_layer(options.layer)
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --layer: {error}")
    return options


class Sweep:
    """One op and layer, with one context for all M. Collective."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.info = options, GEMM_OPINFOS[options.op].with_dtype(options.dtype)
        self.ranks, self.dtype = dist.get_world_size(), dtype_named(options.dtype)
        self.scale = 1 if is_cuda() else _CPU_SCALE
        self.tree = self._read()
        self.begin = time.perf_counter()

    def run(self) -> dict[str, Any]:
        """Measure all missing points; in the second pass, measure the low points again."""
        options, sizes = self.options, self._requested_sizes()
        done = {each["M"] for each in self.tree["points"]}
        again = {
            e["M"]: e for e in self.tree["points"] if e["ratio"] < MIN_RATIO and "before" not in e
        }
        todo = list(again) if options.again else [M for M in sizes if M not in done]
        regret = set(sizes[: options.regret])
        with self.info.context(self._shape(max([1, *sizes, *todo])), self.dtype) as ctx:
            for M in todo:
                if self._time_is_up():
                    break
                found = self._point(M, ctx, M in regret and not options.again)
                if M in again:
                    found |= {"before": again[M]["ratio"]}
                    found |= {name: again[M][name] for name in ("regret",) if name in again[M]}
                    self.tree["points"].remove(again[M])
                self.tree["points"].append(found)
                self._write()
                took = time.perf_counter() - self.begin
                progress(self.tree["points"], len(sizes), took, dist_print)
        return self.tree

    def _requested_sizes(self) -> list[int]:
        """Return the values of M: given, random, then bounds."""
        options = self.options
        each = [
            *options.M,
            *random_sizes(options.M_random, options.most, options.seed),
            *near_bounds(options.most, options.bounds, options.seed),
        ]
        return list(dict.fromkeys(self._shape(M).M for M in each))

    def _shape(self, M: int) -> Any:
        N, K = self.options.sizes
        shape = self.info.layer_shape(M * self.scale, N, K)
        return self.info.smaller(shape, self.scale, self.ranks)

    def _point(self, M: int, ctx: Any, regret: bool) -> dict[str, Any]:
        options = self.options
        rounds = options.rounds * (4 if options.again else 1)
        tuned = TunedOp(self.info, self._shape(M), self.dtype, ctx, CandidateSelection(0))
        workload = _SweepWorkload(tuned, options.limit, regret)
        rows, failures = measure(workload, ["graph"], rounds, warmup_rounds=2 if is_cuda() else 1)
        samples = {row.name: row.samples.milliseconds for row in rows}
        kinds = {row.name: row.candidate.kind for row in rows}
        baselines = [name for name, kind in kinds.items() if kind == "baseline"]
        winner = next(row for row in rows if row.name == TUNED)
        details = {
            "own": winner.candidate.kind == "own",
            "config": _short(winner),
            "how": tuned.origin,
            "failures": failures,
        }
        if tuned.tuning_medians:
            details |= {"first_call": tuned.first_call_ms, "raced": tuned.tuning_medians}
        point = make_point(M, samples, baselines, **details)
        finalists = [ms for name, ms in point["ms"].items() if name.startswith(_REGRET)]
        if finalists:
            point["regret"] = round(point["ms"][TUNED] / min(finalists) - 1, 4)
        return point

    def _time_is_up(self) -> bool:
        limit = self.options.minutes
        is_up = [limit is not None and time.perf_counter() - self.begin > 60 * limit]
        dist.broadcast_object_list(is_up, 0)
        return is_up[0]

    def _read(self) -> dict[str, Any]:
        shape = self._shape(1)
        fresh = {
            "benchmark": "any_m", "op": self.options.op, "layer": self.options.layer,
            "N": shape.N, "K": shape.K, "dtype": self.options.dtype, "ranks": self.ranks,
            "hardware": dict(current_device().facts()), "software": software(),
            "environment": environment(), "points": [],
        }  # fmt: skip
        path = self.options.json
        if path is None or not path.exists():
            return fresh
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        same = ("op", "layer", "dtype", "ranks")
        if any(tree[name] != fresh[name] for name in same):
            was = [tree[name] for name in same]
            raise SystemExit(f"{path} has results of {was}: pass another file")
        return tree

    def _write(self) -> None:
        path = self.options.json
        if path is not None and dist.get_rank() == 0:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(self.tree, indent=1) + "\n", encoding="utf-8")
            part.replace(path)


class _SweepWorkload:
    """A tuned op and its baselines at one M.

    ``limit``: also time the GEMM and the transfers alone. ``regret``: also race all configs at this
    M, and time the finalists of this race.
    """

    def __init__(self, tuned: TunedOp, limit: bool, regret: bool) -> None:
        self._tuned, self._limit = tuned, limit
        self._finalists: dict[str, Baseline] = {}
        if regret:
            with _without_records():
                finalists = tuned.tune_again()
            self._finalists = {f"{_REGRET} {n}": each for n, each in enumerate(finalists, start=1)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuned, name)

    def candidates(self) -> dict[str, Baseline]:
        rows = {
            name: each
            for name, each in self._tuned.candidates().items()
            if name != TUNED_AGAIN and (self._limit or each.kind not in ("gemm", "transfer"))
        }
        return {**rows, **self._finalists}


@contextlib.contextmanager
def _without_records() -> Iterator[None]:
    """Context manager in which tuning ignores records and stores none."""
    with (
        tempfile.TemporaryDirectory() as folder,
        environment_with(TRITON_DIST_AUTOTUNE_ALWAYS_TUNE="1", TRITON_DIST_CACHE_DIR=folder),
    ):
        yield


def _short(row: Row) -> str:
    return textwrap.shorten(row.candidate.config, 90)


def show(tree: dict[str, Any], png: Path | None) -> None:
    sizes = f"N = {tree['N']}, K = {tree['K']}, {tree['ranks']} ranks, {tree['dtype']}"
    print(f"{tree['op']}, {tree['layer']}: {sizes}")
    print(*summary(tree["points"]), sep="\n")
    if png is not None:
        draw(tree, png)


def run_both_passes(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Run both passes, each in separate processes."""
    with tempfile.TemporaryDirectory() as folder:
        given = list(arguments)
        if options.json is None:
            given += ["--json", str(Path(folder) / "points.json")]
        command = ["bash", str(ROOT / "scripts" / "launch.sh"), str(Path(__file__)), *given]
        status = subprocess.run(command, check=False).returncode
        if status == 0 and not options.again:
            status = subprocess.run([*command, "--again"], check=False).returncode
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.png is not None:
        check_matplotlib()
    if options.from_json is not None:
        show(json.loads(options.from_json.read_text(encoding="utf-8")), options.png)
        return 0
    if "RANK" not in os.environ:
        return run_both_passes(arguments, options)
    initialize_distributed()
    tree = Sweep(options).run()
    if dist.get_rank() == 0:
        show(tree, options.png)
    finalize_distributed()
    return 0


if __name__ == "__main__":
    if status := main():
        sys.exit(status)
