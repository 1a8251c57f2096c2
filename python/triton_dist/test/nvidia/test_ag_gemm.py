"""AllGather-GEMM on all ranks: ``bash scripts/launch.sh test_ag_gemm.py --case check``.

``check``: compare five rounds of new data, with a scrambled workspace, with all-gather and matmul.
``correctness_tma_autotune``: likewise with a GEMM kernel that ``contextual_autotune`` tunes inside
the op. ``perf``: time the tuned op, its baselines and its limit. On CPU ranks, all cases run at
small shapes; M per rank is odd.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.kernels.nvidia import AllGatherGEMMTensorParallelContext, ag_gemm
from triton_dist.kernels.nvidia.gemm_perf_model import get_tensorcore_tflops
from triton_dist.nv_utils import get_intranode_max_speed_gbps
from triton_dist.profiler_utils import perf_func
from triton_dist.test.utils import (
    LAYER_CONFIGS,
    ScriptParser,
    assert_allclose,
    check_rank_by_rank,
    dtype_named,
    profile,
    report_passed,
    report_times,
    report_tuning,
)
from triton_dist.testing.opinfo.allgather_gemm import AG_GEMM
from triton_dist.testing.opinfo.base import Baseline, Operands
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.timing import captured, interleaved
from triton_dist.testing.tma_autotuned_ag_gemm import TmaAutotunedAgGemm
from triton_dist.utils import (
    dist_print,
    finalize_distributed,
    initialize_distributed,
    is_cuda,
)

# The interpreter executes about 1e7 multiply-adds per second, so CPU ranks use small shapes.
_CPU_CHECK = {"M_per_rank": 37, "N": 256, "K": 96}
_CPU_PERF_SCALE = 64


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, CASES, default="check")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--shape_id", default="LLaMA-3.1-70B", choices=list(LAYER_CONFIGS))
    parser.add_argument("--M", "-M", type=int, default=8192, help="global number of rows (perf)")
    parser.add_argument("--persistent", action=flag, help="choose the kernel; default: tuned")
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--trans_b", action=flag, default=True, help="make B column-major")
    parser.add_argument(
        "--local-copy", action=flag, default=True,
        help="copy this rank's rows of A; with --no-, read them from the workspace",
    )  # fmt: skip
    parser.add_dtype("float16")
    parser.add_argument(
        "--debug", action="store_true", help="tune verbosely, and delay one rank in each round"
    )
    return parser.parse_args()


def make_data(
    args: argparse.Namespace, shape: Shape, dtype: torch.dtype
) -> tuple[Operands, torch.Tensor, torch.Tensor]:
    """Return the operands, and A and B separately."""
    operands = AG_GEMM.operands(shape, dtype, dist.get_world_size(), column_major=args.trans_b)
    return operands, operands["A"], operands["B"]


def check_result(C: torch.Tensor, operands: Operands) -> None:
    tolerance = AG_GEMM.tolerance(C.dtype, dist.get_world_size())
    assert_allclose(C, AG_GEMM.reference(operands), rtol=tolerance, atol=tolerance)


def run_ag_gemm(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
    straggler: int | None = None,
) -> torch.Tensor:
    """Call the op with the options of the command line."""
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


def check_shape(num_ranks: int) -> Shape:
    """Return the shape of the checking cases."""
    if is_cuda():
        return Shape(4091 * num_ranks, 5120, 1024)
    return Shape(_CPU_CHECK["M_per_rank"] * num_ranks, _CPU_CHECK["N"], _CPU_CHECK["K"])


def check(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    shape = check_shape(num_ranks)
    with AG_GEMM.context(shape, dtype) as ctx:
        for round_number in range(5):
            operands, A, B = make_data(args, shape, dtype)
            ctx.symm_workspace[: shape.M].random_()
            if not args.local_copy:
                ctx.own_rows(A.shape[0]).copy_(A)
            C = run_ag_gemm(args, A, B, ctx, round_number % num_ranks if args.debug else None)
            expected, tolerance = AG_GEMM.reference(operands), AG_GEMM.tolerance(dtype, num_ranks)
            check_rank_by_rank(C, expected, tolerance)
        report_config(args, A, B, ctx)
    report_passed(f"{args.dtype}, {shape}")


def perf(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    layer = LAYER_CONFIGS[args.shape_id]
    scale = 1 if is_cuda() else _CPU_PERF_SCALE
    shape = AG_GEMM.scaled(AG_GEMM.layer(args.M, layer["N"], layer["K"]), scale, num_ranks)
    operands, A, B = make_data(args, shape, dtype)
    with AG_GEMM.context(shape, dtype) as ctx:
        if not args.local_copy:
            ctx.own_rows(A.shape[0]).copy_(A)

        def ours() -> torch.Tensor:
            return run_ag_gemm(args, A, B, ctx)

        check_result(ours(), operands)
        report_config(args, A, B, ctx)
        candidates = {AG_GEMM.name: Baseline("own", ours), **AG_GEMM.baselines(operands, ctx)}
        calls = {name: each.call for name, each in candidates.items()}
        samples = interleaved(
            calls | {f"{name}, CUDA graph": captured(call) for name, call in calls.items()}
            if is_cuda()
            else calls,
            rounds=15 if is_cuda() else 3,
        )
        title = f"{shape} {dtype} on {num_ranks} ranks"
        eager = {name: samples[name] for name in calls}
        if is_cuda():
            report_rates(perf_func(ours, iters=10, warmup_iters=5)[1], shape, dtype)
        report_times(title, candidates, eager, AG_GEMM.serial, AG_GEMM.transfer)
        if is_cuda():
            graphs = {name: samples[f"{name}, CUDA graph"] for name in calls}
            report_times(
                f"{title}, CUDA graphs", candidates, graphs, AG_GEMM.serial, AG_GEMM.transfer
            )
        profile("ag_gemm_perf", args.profile, ours)


def report_config(
    args: argparse.Namespace,
    A: torch.Tensor,
    B: torch.Tensor,
    ctx: AllGatherGEMMTensorParallelContext,
) -> None:
    if args.persistent is None or not args.autotune:
        tuned_now, options = ag_gemm.tuning_count > 0, {"local_copy": args.local_copy}
        report_tuning(ag_gemm, args.autotune, tuned_now, A, B, ctx, **options)


def report_rates(own_ms: float, shape: Shape, dtype: torch.dtype) -> None:
    """Print each rank's rates for back-to-back calls with warm caches."""
    cost = AG_GEMM.cost(shape, dtype, dist.get_world_size())
    read, written, received = (
        nbytes / own_ms / 1e6 for nbytes in (cost.read_bytes, cost.written_bytes, cost.link_bytes)
    )
    dist_print(
        f"rank {dist.get_rank()}: {own_ms:.3f} ms/iter, {cost.flops / own_ms / 1e9:.1f} TFLOP/s, "
        f"{read:.0f} GB/s read, {written:.0f} GB/s written, {received:.0f} GB/s received",
        need_sync=True,
        allowed_ranks="all",
    )
    dist_print(
        f"peaks: {get_tensorcore_tflops(dtype):.0f} TFLOP/s, "
        f"{get_intranode_max_speed_gbps():.0f} GB/s per link"
    )


def correctness_tma_autotune(args: argparse.Namespace) -> None:
    dtype, num_ranks = dtype_named(args.dtype), dist.get_world_size()
    shape = check_shape(num_ranks)
    buffer = AllGatherBuffer(shape.M, shape.K, dtype, None, "ag_gemm_tma_autotune")
    op = TmaAutotunedAgGemm(buffer)
    for _ in range(5):
        operands, A, B = make_data(args, shape, dtype)
        check_result(op(A, B), operands)
    for kernel, config in op.choices().items():
        dist_print(f"{kernel}: {config}", need_sync=True, allowed_ranks="all", prefix=True)
    dist_print(f"calls to tune: {op.tuning_calls}")
    dist.barrier()
    buffer.free()
    report_passed(f"{args.dtype}, {shape}")


CASES = {"check": check, "correctness_tma_autotune": correctness_tma_autotune, "perf": perf}


def main() -> None:
    args = get_args()
    initialize_distributed()
    CASES[args.case](args)
    finalize_distributed()


if __name__ == "__main__":
    main()
