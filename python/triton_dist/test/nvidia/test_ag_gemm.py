"""AllGather-GEMM on all ranks: ``bash scripts/launch.sh test_ag_gemm.py --case check``.

``check``: five rounds of fresh data and a scrambled workspace against all-gather and matmul.
``correctness_tma_autotune``: the same with a GEMM kernel that ``contextual_autotune`` tunes inside
the op. ``perf``: the tuned op beside its peers and its limit. On CPU ranks all run at small shapes,
M per rank odd.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.kernels.nvidia import (
    AllGatherGEMMTensorParallelContext,
    ag_gemm,
    create_ag_gemm_context,
)
from triton_dist.kernels.nvidia.gemm_perf_model import get_tensorcore_tflops
from triton_dist.nv_utils import get_intranode_max_speed_gbps
from triton_dist.profiler_utils import group_profile, perf_func
from triton_dist.runtime.device import current_device
from triton_dist.test.options import ScriptParser
from triton_dist.test.report import report_passed, report_times
from triton_dist.test.utils import LAYER_CONFIGS, assert_allclose, dtype_named
from triton_dist.testing.ag_gemm_peers import SERIAL, ag_gemm_peers
from triton_dist.testing.overlap import Candidate
from triton_dist.testing.reference import all_gather_matmul
from triton_dist.testing.timing import captured, interleaved
from triton_dist.testing.tma_autotuned_ag_gemm import TmaAutotunedAgGemm
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
    rand_tensor,
)

# The interpreter does about 1e7 multiply-adds a second: shapes for CPU ranks.
_CPU_CHECK = {"M_per_rank": 37, "N": 256, "K": 96}
_CPU_PERF_SCALE = 64
# atol = rtol against a product of the same inputs in the same dtype.
_TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 2e-2, torch.float32: 1e-3}


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, CASES, default="check")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--shape_id", default="LLaMA-3.1-70B", choices=list(LAYER_CONFIGS))
    parser.add_argument("--M", "-M", type=int, default=8192, help="global number of rows (perf)")
    parser.add_argument("--persistent", action=flag, help="fix the kind of kernel; default: tuned")
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--trans_b", action=flag, default=True, help="B column-major")
    parser.add_argument(
        "--local-copy", action=flag, default=True, help="off: own rows are in the workspace"
    )
    parser.add_dtype("float16")
    parser.add_argument(
        "--debug", action="store_true", help="verbose tuning, a straggler in each round"
    )
    return parser.parse_args()


def make_data(
    M: int, N: int, K: int, dtype: torch.dtype, trans_b: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A = U(-1, 1) * (rank + 1) * 0.01 [M / W, K] and B = U(-1, 1) [K, N / W], column-major if
    ``trans_b``."""
    rank, num_ranks, device = dist.get_rank(), dist.get_world_size(), current_device().torch_device
    A = rand_tensor([M // num_ranks, K], dtype, device) * ((rank + 1) * 0.01)
    if trans_b:
        return A, rand_tensor([N // num_ranks, K], dtype, device).T
    return A, rand_tensor([K, N // num_ranks], dtype, device)


def run_ag_gemm(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    straggler: int | None = None,
) -> torch.Tensor:
    """One call as the command line asks for it."""
    options = (
        {}
        if args.persistent is None
        else {"persistent": args.persistent, "autotune_allow_arg_overwrite": True}
    )
    if straggler is not None:
        options["straggler_option"] = (straggler, 2_000_000)
    C: torch.Tensor = ag_gemm(
        A, B, ctx, autotune=args.autotune, autotune_verbose=args.debug, local_copy=args.local_copy,
        **options,
    )  # fmt: skip
    return C


def check_shape(num_ranks: int) -> tuple[int, int, int]:
    """Global M, N and K of the cases that check."""
    if is_cuda():
        return 4091 * num_ranks, 5120, 1024
    return _CPU_CHECK["M_per_rank"] * num_ranks, _CPU_CHECK["N"], _CPU_CHECK["K"]


def check(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    M, N, K = check_shape(num_ranks)
    with create_ag_gemm_context(M, N, K, dtype, dist.get_rank(), num_ranks) as ctx:
        for round_number in range(5):
            A, B = make_data(M, N, K, dtype, args.trans_b)
            ctx.symm_workspace[:M].random_()
            if not args.local_copy:
                ctx.own_rows(A.shape[0]).copy_(A)
            C = run_ag_gemm(args, A, B, ctx, round_number % num_ranks if args.debug else None)
            expected = all_gather_matmul(A, B)
            for turn in range(num_ranks):
                dist.barrier()
                if turn == dist.get_rank():
                    assert_allclose(C, expected, rtol=_TOLERANCE[dtype], atol=_TOLERANCE[dtype])
        report_tuning(args, A, B, ctx)
    report_passed(f"{args.dtype}, {M}x{N}x{K}")


def perf(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    shape = LAYER_CONFIGS[args.shape_id]
    scale = 1 if is_cuda() else _CPU_PERF_SCALE
    M, N, K = args.M // scale, shape["N"] // scale, shape["K"] // scale
    M, N = M // num_ranks * num_ranks, N // num_ranks * num_ranks
    A, B = make_data(M, N, K, dtype, args.trans_b)
    with create_ag_gemm_context(M, N, K, dtype, dist.get_rank(), num_ranks) as ctx:
        if not args.local_copy:
            ctx.own_rows(A.shape[0]).copy_(A)

        def ours() -> torch.Tensor:
            return run_ag_gemm(args, A, B, ctx)

        tolerance = _TOLERANCE[dtype]
        assert_allclose(ours(), all_gather_matmul(A, B), rtol=tolerance, atol=tolerance)
        report_tuning(args, A, B, ctx)
        candidates = {"ag_gemm": Candidate("own", ours), **ag_gemm_peers(A, B, ctx)}
        calls = {name: each.call for name, each in candidates.items()}
        samples = interleaved(
            calls | {f"{name}, CUDA graph": captured(call) for name, call in calls.items()}
            if is_cuda()
            else calls,
            rounds=15 if is_cuda() else 3,
        )
        title = f"{M}x{N}x{K} {dtype} on {num_ranks} ranks"
        eager = {name: samples[name] for name in calls}
        if is_cuda():
            report_rates(perf_func(ours, iters=10, warmup_iters=5)[1], M, N, K, dtype)
        report_times(title, candidates, eager, SERIAL, "all-gather")
        if is_cuda():
            graphs = {name: samples[f"{name}, CUDA graph"] for name in calls}
            report_times(f"{title}, CUDA graphs", candidates, graphs, SERIAL, "all-gather")
        with group_profile("ag_gemm_perf", args.profile):
            for _ in range(20 if args.profile else 0):
                ours()


def report_tuning(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
) -> None:
    """Say which config is in use and where it came from."""
    if not args.autotune:
        dist_print("no tuning: the default config")
    elif args.persistent is None:
        origin = "tuned now" if ag_gemm.tuning_count else "from the cache, no tuning"
        dist_print(
            f"config ({origin}): {ag_gemm.best_config(A, B, ctx, local_copy=args.local_copy)}"
        )


def report_rates(own_ms: float, M: int, N: int, K: int, dtype: torch.dtype) -> None:
    """Each rank's rates in steady state: back-to-back calls, caches warm."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    local_N = N // num_ranks
    tflops = 2 * M * local_N * K / own_ms / 1e9
    read = (M * K + K * local_N) * dtype.itemsize / own_ms / 1e6
    written = M * local_N * dtype.itemsize / own_ms / 1e6
    received = M * K * dtype.itemsize * (num_ranks - 1) / num_ranks / own_ms / 1e6
    dist_print(
        f"rank {rank}: {own_ms:.3f} ms/iter, {tflops:.1f} TFLOP/s, {read:.0f} GB/s read, "
        f"{written:.0f} GB/s written, {received:.0f} GB/s received",
        need_sync=True,
        allowed_ranks="all",
    )
    dist_print(
        f"peaks: {get_tensorcore_tflops(dtype):.0f} TFLOP/s, "
        f"{get_intranode_max_speed_gbps():.0f} GB/s a link"
    )


def correctness_tma_autotune(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    M, N, K = check_shape(num_ranks)
    buffer = AllGatherBuffer(M, K, dtype, None, "ag_gemm_tma_autotune")
    op = TmaAutotunedAgGemm(buffer)
    for _ in range(5):
        A, B = make_data(M, N, K, dtype, args.trans_b)
        tolerance = _TOLERANCE[dtype]
        assert_allclose(op(A, B), all_gather_matmul(A, B), rtol=tolerance, atol=tolerance)
    for kernel, config in op.choices().items():
        dist_print(f"{kernel}: {config}", need_sync=True, allowed_ranks="all", prefix=True)
    dist_print(f"calls to tune: {op.tuning_calls}")
    dist.barrier()
    buffer.free()
    report_passed(f"{args.dtype}, {M}x{N}x{K}")


CASES = {"check": check, "correctness_tma_autotune": correctness_tma_autotune, "perf": perf}


def main() -> None:
    args = get_args()
    initialize_distributed()
    CASES[args.case](args)
    finalize_distributed()


if __name__ == "__main__":
    main()
