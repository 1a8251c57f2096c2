"""GEMM-ReduceScatter on all ranks: ``bash scripts/launch.sh test_gemm_rs.py --case check``.

``check``: compare the op with a product and a sum in torch, several times with new data. ``perf``:
for each M, time the op, GEMM and reduce-scatter alone, and both in sequence. On CPU ranks, shapes
are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

import torch.distributed as dist

from triton_dist.test import summed_gemm
from triton_dist.test.summed_gemm import CPU_SCALE, SummedGEMMScript, fixed_tunables
from triton_dist.test.utils import dtype_named, initialized_ranks, report_passed
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.opinfo.summed_gemm import GEMM_RS
from triton_dist.utils import is_cuda


def get_args() -> argparse.Namespace:
    parser = summed_gemm.make_parser(__doc__, M=8192)
    flag = argparse.BooleanOptionalAction
    parser.add_argument(
        "--M_range",
        type=_rows,
        metavar="FIRST-LAST-STEP",
        help="run several M, for example 1024-8192-1024",
    )
    parser.add_argument(
        "--fuse_scatter",
        action=flag,
        help="the GEMM kernel sends tiles; --no-fuse_scatter: copy engines do; default: tuned",
    )
    parser.add_argument(
        "--reduce_st", action=flag, default=False, help="add tiles to the sum when they arrive"
    )
    return parser.parse_args()


def _rows(word: str) -> range:
    try:
        first, last, step = map(int, word.split("-"))
        rows = range(first, last + 1, step)
    except ValueError:
        rows = range(0)
    if not rows or rows[0] < 1:
        raise argparse.ArgumentTypeError(f"{word!r}: expected FIRST-LAST-STEP, 1 <= FIRST <= LAST")
    return rows


def shapes(args: argparse.Namespace) -> list[Shape]:
    """Return the shapes of the command line, reduced on CPU ranks. M and K are multiples of the
    number of ranks."""
    size, scale = dist.get_world_size(), 1 if is_cuda() else CPU_SCALE
    rows = args.M_range or [args.M]
    N, K = max(1, args.N // scale), max(1, args.K // scale // size) * size
    return [Shape(max(1, M // scale // size) * size, N, K) for M in rows]


def check(script: SummedGEMMScript, shape: Shape) -> None:
    for _ in range(script.args.verify_iters):
        data = script.operands(shape)
        script.check(data)
    script.report_tuning(data)
    report_passed(f"{script.args.dtype}, {shape}")


def main() -> None:
    args = get_args()
    with initialized_ranks(args.seed):
        requested_shapes = shapes(args)
        largest = max(requested_shapes, key=lambda shape: shape.M)
        info = GEMM_RS.with_dtype(args.dtype)
        with info.context(largest, dtype_named(args.dtype), reduce_st=args.reduce_st) as ctx:
            fixed = fixed_tunables(args, "persistent", "fuse_scatter")
            script = SummedGEMMScript(info, args, ctx, fixed=fixed)
            for shape in requested_shapes:
                if args.case == "check":
                    check(script, shape)
                else:
                    script.check_and_time(shape)


if __name__ == "__main__":
    main()
