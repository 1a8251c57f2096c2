"""GEMM-AllReduce on all ranks: ``bash scripts/launch.sh test_gemm_ar.py --case check``.

``check``: compare the op with a product and a sum in torch, several times, each with new data,
at most M rows and a delayed rank. ``perf``: time the op, GEMM alone, all-reduce alone, GEMM
then all-reduce, and GEMM then torch's all-reduces in symmetric memory. Pass the shape as -M, -N and
-K, or as three numbers. On CPU ranks, shapes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from typing import Any

import torch.distributed as dist

from triton_dist.kernels.nvidia import GEMMAllReduceMethod
from triton_dist.runtime.device import current_device
from triton_dist.test import summed_gemm
from triton_dist.test.summed_gemm import CPU_SCALE, SummedGEMMScript
from triton_dist.test.utils import dtype_named, initialized_ranks, report_passed
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.summed_gemm import GEMM_AR
from triton_dist.utils import is_cuda

_LATE_CYCLES = 17_000_000  # 10 ms
_CPU_ROWS = 64  # M is not reduced below this number


def get_args() -> argparse.Namespace:
    parser = summed_gemm.make_parser(__doc__, M=128)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("shape", type=int, nargs="*", metavar="SIZE", help="M, N and K")
    parser.add_argument(
        "--low-latency",
        action=flag,
        help="use the one-shot algorithm; --no-low-latency: two-shot; default: tuned",
    )
    parser.add_argument(
        "--copy-to-local", action=flag, default=True,
        help="with --no-copy-to-local, the result may be a view of the context's memory",
    )  # fmt: skip
    args = parser.parse_intermixed_args()
    if len(args.shape) not in (0, 3):
        parser.error(f"{len(args.shape)} sizes, expected 3 (M N K) or none")
    if args.shape:
        args.M, args.N, args.K = args.shape
    return args


def shape_of(args: argparse.Namespace) -> Shape:
    """Return the shape of the command line, reduced on CPU ranks, but M not below ``_CPU_ROWS``. K
    is a multiple of the number of ranks."""
    scale = 1 if is_cuda() else CPU_SCALE
    M = args.M if is_cuda() else min(args.M, max(_CPU_ROWS, args.M // CPU_SCALE))
    N, K = (max(1, size // scale) for size in (args.N, args.K))
    size = dist.get_world_size()
    return Shape(M, N, max(1, K // size) * size)


def fixed_tunables(args: argparse.Namespace) -> dict[str, Any]:
    fixed = summed_gemm.fixed_tunables(args, "persistent")
    if args.low_latency is not None:
        one_shot, two_shot = GEMMAllReduceMethod.ONE_SHOT, GEMMAllReduceMethod.TWO_SHOT
        fixed["method"] = one_shot if args.low_latency else two_shot
    return fixed


def check(script: SummedGEMMScript, shape: Shape) -> None:
    """Compare results: in the first round with M rows, later with M / 2 + 1 to M rows."""
    args, M = script.args, shape.M
    drawn = random.Random(args.seed)  # equal on all ranks
    for turn in range(args.verify_iters):
        rows = drawn.randint(M // 2 + 1, M) if turn else M
        data = script.operands(dataclasses.replace(shape, M=rows))
        late, cycles = drawn.randrange(dist.get_world_size()), drawn.randrange(_LATE_CYCLES)
        if late == dist.get_rank():
            current_device().sleep(cycles)
        script.check(data)
    script.report_tuning(data)
    report_passed(f"{args.dtype}, {shape}")


def main() -> None:
    args = get_args()
    with initialized_ranks(args.seed):
        shape = shape_of(args)
        info = GEMM_AR.with_dtype(args.dtype)
        with info.context(shape, dtype_named(args.dtype)) as ctx:
            options = {"copy_to_local": args.copy_to_local}
            script = SummedGEMMScript(info, args, ctx, options, fixed_tunables(args))
            if args.case == "check":
                check(script, shape)
            else:
                script.check_and_time(shape)


if __name__ == "__main__":
    main()
