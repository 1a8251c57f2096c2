"""All-reduce on all ranks: ``bash scripts/launch.sh test_allreduce.py --case check``.

``check``: compare results at random sizes with sums in fp32, then make back-to-back calls without
synchronisation. ``perf``: print times of the op and of the library; each size is 4 times the
previous size. On CPU ranks, sizes and rounds are reduced for the interpreter.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    AllReduceContext,
    AllReduceMethod,
    all_reduce,
    get_allreduce_methods,
    to_allreduce_method,
)
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    TIMES_NOT_MEANINGFUL,
    ScriptParser,
    assert_allclose,
    assert_bitwise_equal,
    at_least,
    dtype_named,
    initialized_ranks,
    profile,
    report_passed,
)
from triton_dist.testing.opinfo.collectives import ALL_REDUCE, IN_PLACE, LIBRARY, CollectiveSize
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, is_cuda, rand_tensor

_CPU_SCALE = 256
_FIRST_BYTES = 128
_LATE_CYCLES = 17_000_000  # 10 ms


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, check_alias="--stress")
    parser.add_argument(
        "--max_nbytes", type=int, default=4 << 20, help="bytes of the largest tensor"
    )
    parser.add_rounds(iters=10, warmup=5)
    parser.add_argument(
        "--verify_shapes", type=at_least(1), default=25, help="number of sizes per round of check"
    )
    parser.add_argument(
        "--verify_hang", type=at_least(0), default=100, help="back-to-back calls per round of check"
    )
    parser.add_argument("--seed", type=int, default=40, help="seed of sizes, data and delays")
    parser.add_argument(
        "--alignment",
        type=at_least(1),
        default=16,
        help="numbers of elements are multiples of this number",
    )
    parser.add_argument(
        "--method", choices=get_allreduce_methods(), help="algorithm; default: tuned"
    )
    parser.add_common_options("autotune", "profile")
    parser.add_argument(
        "--simulate_straggler", action="store_true", help="delay a random rank in each call"
    )
    parser.add_dtype("bfloat16")
    parser.add_argument("--debug", action="store_true", help="use constant data: (rank + 1) / 128")
    args = parser.parse_args()
    if not is_cuda():
        args.max_nbytes = max(256, args.max_nbytes // _CPU_SCALE)
        args.iters, args.verify_shapes = min(args.iters, 2), min(args.verify_shapes, 4)
        args.verify_hang = min(args.verify_hang, 8)
    return args


def run_all_reduce(
    args: argparse.Namespace,
    x: torch.Tensor,
    ctx: AllReduceContext,
    straggler: tuple[int, int] | None = None,
) -> torch.Tensor:
    method = None if args.method is None else to_allreduce_method(args.method)
    total: torch.Tensor = all_reduce(
        x, ctx, method=method, straggler_option=straggler, autotune=args.autotune
    )
    return total


def make_data(args: argparse.Namespace, elements: int) -> torch.Tensor:
    """Return uniform random values from -1 to 1; with ``--debug``, only (rank + 1) / 128."""
    dtype, device = dtype_named(args.dtype), current_device().torch_device
    if args.debug:
        return torch.full((elements,), (dist.get_rank() + 1) / 128, dtype=dtype, device=device)
    return rand_tensor([elements], dtype, device)


def check_sum(x: torch.Tensor, output: torch.Tensor) -> None:
    tolerance = ALL_REDUCE.tolerance(x.dtype, dist.get_world_size())
    assert_allclose(output, ALL_REDUCE.reference({"x": x}), tolerance, tolerance)


def check(args: argparse.Namespace, ctx: AllReduceContext) -> None:
    rng = random.Random(args.seed)  # equal on all ranks
    most = max(1, args.max_nbytes // dtype_named(args.dtype).itemsize // args.alignment)
    for _ in range(args.iters):
        inputs = [
            make_data(args, args.alignment * rng.randint(1, most))
            for _ in range(args.verify_shapes)
        ]
        outputs = [run_all_reduce(args, x, ctx) for x in inputs]
        again = [run_all_reduce(args, x, ctx, _straggler(args, rng)) for x in inputs]
        for x, output, repeated in zip(inputs, outputs, again, strict=True):
            check_sum(x, output)
            if args.method != AllReduceMethod.COLLECTIVE.value:
                assert_bitwise_equal(repeated, output)
        for x in itertools.islice(itertools.cycle(inputs), args.verify_hang):
            run_all_reduce(args, x, ctx, _straggler(args, rng))
        current_device().synchronize()
    calls = args.iters * (2 * args.verify_shapes + args.verify_hang)
    report_passed(f"{args.dtype}, {args.method or 'tuned'}, {calls} calls")


def _straggler(args: argparse.Namespace, rng: random.Random) -> tuple[int, int] | None:
    if not args.simulate_straggler:
        return None
    return rng.randrange(dist.get_world_size()), rng.randint(0, _LATE_CYCLES)


def sizes_to_measure(args: argparse.Namespace) -> Iterator[int]:
    """Yield numbers of elements: of 128 bytes, then each time 4 times as many."""
    nbytes = _FIRST_BYTES
    while nbytes <= args.max_nbytes:
        yield nbytes // dtype_named(args.dtype).itemsize
        nbytes *= 4


def perf(args: argparse.Namespace, ctx: AllReduceContext) -> None:
    measured = is_cuda()
    dist_print(
        "times in us: ours, the library's, and the library's in place; GB/s: bytes / our time; "
        "x: speedup over the faster library time"
        if measured
        else TIMES_NOT_MEANINGFUL
    )
    heads = f"{'GB/s':>8}{'library':>10}{'in place':>10}{'x':>6}" if measured else ""
    dist_print(f"{'bytes':>10}{'us':>10}{heads}  config")
    for elements in sizes_to_measure(args):
        x = make_data(args, elements)
        check_sum(x, run_all_reduce(args, x, ctx))
        baselines = ALL_REDUCE.baselines({"x": x}, ctx)
        calls = {name: capture_graph(baselines[name].call) for name in (LIBRARY, IN_PLACE)}
        calls["ours"] = capture_graph(lambda x=x: run_all_reduce(args, x, ctx))  # type: ignore[misc]
        samples = time_interleaved(calls, max(2, args.iters), args.warmup)
        own, library, in_place = (
            samples[name].median * 1e3 for name in ("ours", LIBRARY, IN_PLACE)
        )
        compared = (
            f"{x.nbytes / own / 1e3:8.1f}{library:10.1f}{in_place:10.1f}"
            f"{min(library, in_place) / own:6.2f}"
        )
        dist_print(
            f"{x.nbytes:10}{own:10.1f}{compared if measured else ''}  {_config(args, x, ctx)}"
        )
    profile("allreduce_perf", args.profile, lambda: run_all_reduce(args, x, ctx))


def _config(args: argparse.Namespace, x: torch.Tensor, ctx: AllReduceContext) -> object:
    if not args.autotune:
        return "default"
    method = None if args.method is None else to_allreduce_method(args.method)
    return all_reduce.best_config(x, ctx, method=method)


def main() -> None:
    args = get_args()
    with (
        initialized_ranks(args.seed),
        ALL_REDUCE.context(CollectiveSize(args.max_nbytes), dtype_named(args.dtype)) as ctx,
    ):
        (check if args.case == "check" else perf)(args, ctx)


if __name__ == "__main__":
    main()
