"""All-gather on all ranks: ``bash scripts/launch.sh test_all_gather.py --case check``.

``check``: compare every algorithm with the library bit by bit, at sizes that are and are not
multiples of 16 bytes. ``perf``: time the tuned op and the library. Without ``--case``, do both for
each size. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

from triton_dist.kernels.nvidia import AllGatherContext, GatherMethod, all_gather
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    TIMES_NOT_MEANINGFUL,
    ScriptParser,
    assert_bitwise_equal,
    dtype_named,
    initialized_ranks,
    report_passed,
)
from triton_dist.testing.opinfo.collectives import ALL_GATHER, LIBRARY, CollectiveSize
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, is_cuda, rand_tensor

_CPU_SCALE = 512


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, default=None, check_alias="")
    parser.add_argument(
        "--max_nbytes", type=int, default=16 << 20, help="bytes of the largest result"
    )
    parser.add_dtype("bfloat16")
    parser.add_rounds(iters=15, warmup=3, minimum=0)  # 0: only check
    parser.add_common_options("autotune", "seed")
    args = parser.parse_args()
    if not is_cuda():
        args.max_nbytes = max(1024, args.max_nbytes // _CPU_SCALE)
    return args


def check(args: argparse.Namespace, ctx: AllGatherContext, elements: int) -> None:
    for number in range(elements - 1, elements + 1):
        x = rand_tensor([number], dtype_named(args.dtype), current_device().torch_device)
        expected = ALL_GATHER.reference({"x": x})
        for method in GatherMethod:
            assert_bitwise_equal(all_gather.fn(x, ctx, method=method), expected)
        assert_bitwise_equal(all_gather(x, ctx, autotune=args.autotune), expected)


def perf(args: argparse.Namespace, ctx: AllGatherContext, elements: int) -> None:
    x = rand_tensor([elements], dtype_named(args.dtype), current_device().torch_device)
    calls = {
        LIBRARY: capture_graph(ALL_GATHER.baselines({"x": x}, ctx)[LIBRARY].call),
        "ours": capture_graph(lambda: all_gather(x, ctx, autotune=args.autotune)),
    }
    samples = time_interleaved(calls, max(2, args.iters), args.warmup)
    library, own = (samples[name].median * 1e3 for name in calls)
    nbytes = x.nbytes * ctx.num_ranks
    compared = (
        f", {nbytes / own / 1e3:7.1f} GB/s; library {library:9.1f} us, x {library / own:.2f}"
        if is_cuda()
        else ""
    )
    dist_print(f"{nbytes:12} bytes: {own:9.1f} us{compared}")


def main() -> None:
    args = get_args()
    with initialized_ranks(args.seed):
        if args.case != "check":
            heading = "median of the slowest rank; x: speedup over the library"
            dist_print(heading if is_cuda() else TIMES_NOT_MEANINGFUL)
        with ALL_GATHER.context(CollectiveSize(args.max_nbytes), dtype_named(args.dtype)) as ctx:
            elements = args.max_nbytes // ctx.num_ranks // dtype_named(args.dtype).itemsize
            while elements > 16:
                if args.case != "perf":
                    check(args, ctx, elements)
                if args.case != "check" and args.iters:
                    perf(args, ctx, elements)
                elements //= 4
        if args.case != "perf":
            report_passed(args.dtype)


if __name__ == "__main__":
    main()
