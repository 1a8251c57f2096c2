"""GEMM-ReduceScatter on all ranks: ``bash scripts/launch.sh test_gemm_rs.py --check``.

Without ``--check`` it measures: the op beside its two parts alone and the two one after the other,
for each M. With it, rounds of fresh data are compared with a product and sum in torch. On CPU ranks
shapes are scaled down to what the interpreter can do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    GEMMReduceScatterTensorParallelContext,
    create_gemm_rs_context,
    gemm_rs,
)
from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import assert_allclose, dtype_named
from triton_dist.testing.gemm_rs_peers import SERIAL, gemm_rs_peers, summed_rows
from triton_dist.testing.overlap import Candidate, overlap_limit
from triton_dist.testing.timing import captured, interleaved
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    init_seed,
    initialize_distributed,
    is_cuda,
    rand_tensor,
)

_CPU_SCALE = 64
# atol = rtol: W parts are rounded to the dtype, and so is their sum.
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-3}
Shape = tuple[int, int, int]


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    flag = argparse.BooleanOptionalAction
    parser.add_argument("-M", type=int, default=8192, help="global number of rows")
    parser.add_argument(
        "--M_range", help="FIRST-LAST-STEP: several M instead, such as 1024-8192-1024"
    )
    parser.add_argument("-N", type=int, default=8192, help="columns of B")
    parser.add_argument("-K", type=int, default=28672, help="global K")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16", "float32"])
    parser.add_argument("--warmup", type=int, default=3, help="rounds before those that count")
    parser.add_argument("--iters", type=int, default=15, help="rounds that count")
    parser.add_argument("--trans_b", action=flag, default=True, help="B column-major")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--check", action="store_true", help="compare results, measure nothing")
    parser.add_argument("--verify-iters", type=int, default=5, help="rounds of --check")
    parser.add_argument("--persistent", action=flag, help="fix the kind of kernel; default: tuned")
    parser.add_argument("--fuse_scatter", action=flag, help="fix the transfer; default: tuned")
    parser.add_argument("--reduce_st", action=flag, default=False, help="add tiles on arrival")
    parser.add_argument("--has_bias", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def shapes(args: argparse.Namespace) -> list[Shape]:
    """(M, N, K_per_rank) as the command line asks for, scaled on CPU ranks; M is cut to a multiple
    of the ranks."""
    size, scale = dist.get_world_size(), 1 if is_cuda() else _CPU_SCALE
    rows = [args.M]
    if args.M_range:
        first, last, step = map(int, args.M_range.split("-"))
        rows = list(range(first, last + 1, step))
    N, K = max(1, args.N // scale), max(1, args.K // scale // size)
    return [(max(1, M // scale // size) * size, N, K) for M in rows]


def make_data(
    args: argparse.Namespace, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A = U(-1, 1) * (rank + 1) * 0.01 [M, K_per_rank], B = U(-1, 1) [K_per_rank, N], column-major
    if ``trans_b``, and a bias [N] or none."""
    M, N, K = shape
    dtype, device = dtype_named(args.dtype), current_device().torch_device
    A = rand_tensor([M, K], dtype, device) * ((dist.get_rank() + 1) * 0.01)
    B = rand_tensor([N, K], dtype, device).T if args.trans_b else rand_tensor([K, N], dtype, device)
    return A, B, rand_tensor([N], dtype, device) if args.has_bias else None


def run_gemm_rs(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
) -> torch.Tensor:
    """One call as the command line asks for it."""
    fixed = {
        name: getattr(args, name)
        for name in ("persistent", "fuse_scatter")
        if getattr(args, name) is not None
    }
    rows: torch.Tensor
    if args.autotune:
        overwrite = {"autotune_allow_arg_overwrite": True} if fixed else {}
        rows = gemm_rs(A, B, ctx, bias=bias, **fixed, **overwrite)
    else:
        persistent = fixed.setdefault("persistent", current_device().prefers_descriptors)
        tiles = get_config_space(persistent)[0]
        rows = gemm_rs.fn(A, B, ctx, gemm_config=tiles, bias=bias, **fixed)
    return rows


def check(
    args: argparse.Namespace, shape: Shape, ctx: GEMMReduceScatterTensorParallelContext
) -> None:
    tolerance = _TOLERANCE[dtype_named(args.dtype)]
    for _ in range(args.verify_iters):
        A, B, bias = make_data(args, shape)
        C = run_gemm_rs(args, A, B, bias, ctx)
        expected = summed_rows(A, B, bias)
        for turn in range(dist.get_world_size()):
            dist.barrier()
            if turn == dist.get_rank():
                assert_allclose(C, expected, rtol=tolerance, atol=tolerance)
    if args.verify_iters:
        report_tuning(args, A, B, bias, ctx)
    M, N, K = shape
    dist_print(
        f"✅ check passed: {dist.get_world_size()} ranks, {current_device().name}, {args.dtype}, "
        f"{M}x{N}x{K * dist.get_world_size()}"
    )


def perf(
    args: argparse.Namespace, shape: Shape, ctx: GEMMReduceScatterTensorParallelContext
) -> None:
    A, B, bias = make_data(args, shape)

    def ours() -> torch.Tensor:
        return run_gemm_rs(args, A, B, bias, ctx)

    tolerance = _TOLERANCE[A.dtype]
    assert_allclose(ours(), summed_rows(A, B, bias), rtol=tolerance, atol=tolerance)
    report_tuning(args, A, B, bias, ctx)
    candidates = {"gemm_rs": Candidate("own", ours), **gemm_rs_peers(A, B, bias)}
    calls = {name: captured(each.call) for name, each in candidates.items()}
    report_table(args, shape, candidates, calls)
    with group_profile("gemm_rs_perf", args.profile):
        for _ in range(20 if args.profile else 0):
            ours()


def report_tuning(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    ctx: GEMMReduceScatterTensorParallelContext,
) -> None:
    """Say which config is in use and where it came from."""
    if not args.autotune:
        dist_print("no tuning: the default config")
    elif args.persistent is None and args.fuse_scatter is None:
        origin = "tuned now" if gemm_rs.tuning_count else "from the cache, no tuning"
        dist_print(f"config ({origin}): {gemm_rs.best_config(A, B, ctx, bias=bias)}")


def report_table(
    args: argparse.Namespace,
    shape: Shape,
    candidates: Mapping[str, Candidate],
    calls: Mapping[str, object],
) -> None:
    """Medians of the slowest rank beside the serial op and the limit max(GEMM, reduce-scatter)."""
    samples = interleaved(calls, rounds=max(2, args.iters), warmup_rounds=args.warmup)  # type: ignore[arg-type]
    limit, serial = overlap_limit(candidates, samples), samples[SERIAL].median
    M, N, K = shape
    size = dist.get_world_size()
    dist_print(f"{M}x{N}x{K * size} {args.dtype} on {size} ranks, slowest rank, cold cache:")
    dist_print(f"{'':32}{'ms':>10}{'quartiles':>20}{'x serial':>10}{'/ limit':>9}")
    for name, sample in samples.items():
        quartiles = "{:.3f}-{:.3f}".format(*sample.spread)
        ratios = f"{serial / sample.median:10.2f}{sample.median / limit:9.2f}"
        dist_print(f"{name:32}{sample.median:10.3f}{quartiles:>20}{ratios}")
    dist_print(f"{'limit max(GEMM, reduce-scatter)':32}{limit:10.3f}")


def main() -> None:
    args = get_args()
    initialize_distributed(args.seed)
    init_seed(args.seed + dist.get_rank())
    asked = shapes(args)
    rank, size = dist.get_rank(), dist.get_world_size()
    with create_gemm_rs_context(
        max(M for M, _, _ in asked), asked[0][1], rank, size, size, dtype_named(args.dtype),
        reduce_st=args.reduce_st,
    ) as ctx:  # fmt: skip
        for shape in asked:
            (check if args.check else perf)(args, shape, ctx)
    finalize_distributed()


if __name__ == "__main__":
    main()
