"""AllGather-GEMM on all ranks: ``bash scripts/launch.sh test_ag_gemm.py --case check``.

``check``: compare the op with all-gather and matmul five times, each time with new data and random
bytes in the workspace. ``correctness_tma_autotune``: the same comparison for a GEMM kernel that
``contextual_autotune`` tunes inside the op. ``perf``: time the tuned op, its baselines and its
parts. CPU ranks use small shapes. M per rank is odd.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common.slots.gathered import AllGatherBuffer
from triton_dist.kernels.nvidia.gemm_perf_model import get_tensorcore_tflops
from triton_dist.nv_utils import get_intranode_max_speed_gbps
from triton_dist.profiler_utils import perf_func
from triton_dist.test.utils import (
    LAYER_CONFIGS,
    Script,
    ScriptParser,
    dtype_named,
    profile,
    report_passed,
    report_times,
)
from triton_dist.testing.opinfo.allgather_gemm import AG_GEMM
from triton_dist.testing.opinfo.base import RECIPES, Baseline, Cost, Operands
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.testing.tma_autotuned_ag_gemm import TmaAutotunedAgGemm
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, is_cuda

# The interpreter executes about 1e7 multiply-adds per second, so CPU ranks use small shapes.
_CPU_CHECK = {"M_per_rank": 37, "N": 256, "K": 96}
_CPU_PERF_SCALE = 64


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, CASES, default="check", check_alias="")
    parser.add_argument("--shape_id", default="LLaMA-3.1-70B", choices=list(LAYER_CONFIGS))
    parser.add_argument("--M", "-M", type=int, default=8192, help="global number of rows (perf)")
    parser.add_common_options("persistent", "profile", "autotune", "trans_b")
    parser.add_argument(
        "--local-copy", action=argparse.BooleanOptionalAction, default=True,
        help="with --no-local-copy, A is already in the workspace when the op is called",
    )  # fmt: skip
    parser.add_dtype("float16", has_fp8=True)
    parser.add_argument(
        "--debug", action="store_true", help="tune verbosely, and delay one rank in each round"
    )
    args = parser.parse_args()
    if args.dtype in RECIPES and args.case == "correctness_tma_autotune":
        parser.error("correctness_tma_autotune has no fp8")
    return args


class AllGatherScript(Script):
    """The script of AllGather-GEMM."""

    def operands(self, shape: Shape) -> Operands:  # type: ignore[override]
        """Return the operands; with ``--no-local-copy``, copy A to the workspace. Collective."""
        data = super().operands(shape, column_major=self.args.trans_b)
        if not self.args.local_copy and self.ctx is not None:
            self.ctx.own_rows(data["A"].shape[0]).copy_(data["A"])
        return data

    def run(self, data: Operands, **more: Any) -> torch.Tensor:
        operands, options = self.arguments(data)
        overwrite = {"autotune_allow_arg_overwrite": True} if self.fixed else {}
        C: torch.Tensor = self.op(
            *operands, autotune=self.args.autotune, autotune_verbose=self.args.debug,
            **options, **self.fixed, **overwrite, **more,
        )  # fmt: skip
        return C


def make_script(args: argparse.Namespace, ctx: Any) -> AllGatherScript:
    fixed = {} if args.persistent is None else {"persistent": args.persistent}
    info = AG_GEMM.with_dtype(args.dtype)
    return AllGatherScript(info, args, ctx, {"local_copy": args.local_copy}, fixed)


def check_shape(num_ranks: int) -> Shape:
    if is_cuda():
        return Shape(4091 * num_ranks, 5120, 1024)
    return Shape(_CPU_CHECK["M_per_rank"] * num_ranks, _CPU_CHECK["N"], _CPU_CHECK["K"])


def check(args: argparse.Namespace) -> None:
    shape = check_shape(dist.get_world_size())
    with AG_GEMM.with_dtype(args.dtype).context(shape, dtype_named(args.dtype)) as ctx:
        script = make_script(args, ctx)
        for round_number in range(5):
            ctx.symm_workspace[: shape.M].view(torch.uint8).random_()
            data = script.operands(shape)
            late = (round_number % script.num_ranks, 2_000_000)
            C = script.run(data, **({"straggler_option": late} if args.debug else {}))
            script.check(data, C)
        script.report_tuning(data)
    report_passed(f"{args.dtype}, {shape}")


def perf(args: argparse.Namespace) -> None:
    info, dtype, num_ranks = (
        AG_GEMM.with_dtype(args.dtype),
        dtype_named(args.dtype),
        dist.get_world_size(),
    )
    layer = LAYER_CONFIGS[args.shape_id]
    scale = 1 if is_cuda() else _CPU_PERF_SCALE
    shape = info.smaller(info.layer_shape(args.M, layer["N"], layer["K"]), scale, num_ranks)
    with info.context(shape, dtype) as ctx:
        script = make_script(args, ctx)
        data = script.operands(shape)
        script.check(data)
        script.report_tuning(data)

        def ours() -> torch.Tensor:
            return script.run(data)

        candidates = {info.name: Baseline("own", ours), **info.baselines(data, ctx)}
        calls = {name: each.call for name, each in candidates.items()}
        samples = time_interleaved(
            calls | {f"{name}, CUDA graph": capture_graph(call) for name, call in calls.items()}
            if is_cuda()
            else calls,
            rounds=15 if is_cuda() else 3,
        )
        title = f"{shape} {args.dtype} on {num_ranks} ranks"
        eager = {name: samples[name] for name in calls}
        if is_cuda():
            own_ms = perf_func(ours, iters=10, warmup_iters=5)[1]
            report_rates(own_ms, info.cost(shape, dtype, num_ranks))
        report_times(title, candidates, eager, info.serial_name, info.collective_name)
        if is_cuda():
            graphs = {name: samples[f"{name}, CUDA graph"] for name in calls}
            report_times(
                f"{title}, CUDA graphs", candidates, graphs, info.serial_name, info.collective_name
            )
        profile("ag_gemm_perf", args.profile, ours)


def report_rates(own_ms: float, cost: Cost) -> None:
    """Print each rank's rates for ``own_ms`` per call, measured back to back with warm caches."""
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
        f"peaks: {get_tensorcore_tflops(cost.dtype):.0f} TFLOP/s, "
        f"{get_intranode_max_speed_gbps():.0f} GB/s per link"
    )


def correctness_tma_autotune(args: argparse.Namespace) -> None:
    shape = check_shape(dist.get_world_size())
    buffer = AllGatherBuffer(
        shape.M, shape.K, dtype_named(args.dtype), None, "ag_gemm_tma_autotune"
    )
    op, script = TmaAutotunedAgGemm(buffer), make_script(args, None)
    for _ in range(5):
        data = script.operands(shape)
        script.check(data, op(data["A"], data["B"]))
    for kernel, config in op.choices().items():
        dist_print(f"{kernel}: {config}", need_sync=True, allowed_ranks="all", prefix=True)
    dist_print(f"calls to tune: {op.num_tuning_calls}")
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
