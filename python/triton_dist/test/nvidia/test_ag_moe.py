"""AllGather + grouped GEMM on all ranks: ``bash scripts/launch.sh test_ag_moe.py --M 2048``.

For each of five layers, tune the op, compare it with a torch loop over the experts, and time it
next to its parts and baselines. ``--check``: five rounds of new data and routings without timing.
On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import MoEAllGatherGroupGEMMTensorParallelContext, ag_group_gemm
from triton_dist.test.utils import (
    ScriptParser,
    check_rank_by_rank,
    dtype_named,
    on_ranks,
    report_passed,
    report_perf,
    report_tuning,
)
from triton_dist.testing.opinfo.allgather_group_gemm import AG_GROUP_GEMM
from triton_dist.testing.opinfo.base import Operands
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.utils import is_cuda

# Global N and K, number of experts, experts per token.
LAYERS = {
    "Dummy": (8192, 8192, 32, 3),
    "Qwen1.5-MoE-A2.7B": (1408, 2048, 60, 4),
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Mixtral-8x22B": (6144, 16384, 8, 2),
    "DeepSeek-MoE": (2048, 1408, 64, 6),
}
_CPU_SCALE = 64
_ROUNDS_OF_CHECK = 5


def get_args() -> argparse.Namespace:
    parser = ScriptParser(__doc__, CASES, default="perf")
    parser.add_alias("--check", "check")
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--M", "-M", type=int, default=8192, help="tokens over all ranks")
    parser.add_argument("--layer", choices=list(LAYERS), help="run one layer; default: all")
    parser.add_rounds(iters=10, warmup=5)
    parser.add_dtype("float16")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--debug", action="store_true", help="tune verbosely")
    parser.add_argument("--seed", type=int, default=42, help="seed of the data")
    return parser.parse_args()


def shape_of(layer: str, M: int) -> GroupedShape:
    """Return the shape, reduced on CPU ranks; M and N are multiples of the ranks."""
    scale = 1 if is_cuda() else _CPU_SCALE
    return AG_GROUP_GEMM.scaled(GroupedShape(M, *LAYERS[layer]), scale, dist.get_world_size())


def run(
    args: argparse.Namespace, data: Operands, ctx: MoEAllGatherGroupGEMMTensorParallelContext
) -> torch.Tensor:
    """Call the op with the options of the command line."""
    operands, options = AG_GROUP_GEMM.arguments(data, ctx)
    output: torch.Tensor = ag_group_gemm(
        *operands, **options, autotune=args.autotune, autotune_verbose=args.debug
    )
    return output


def check(
    args: argparse.Namespace,
    layer: str,
    data: Operands,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
) -> None:
    for number in range(_ROUNDS_OF_CHECK if args.case == "check" else 1):
        if number:
            AG_GROUP_GEMM.refill(data, dist.get_world_size())
            data["full_topk_ids"][number::7] = -1  # like the ids that pad a batch
        before = ag_group_gemm.tuning_count
        output = run(args, data, ctx)
        limit = AG_GROUP_GEMM.tolerance(output.dtype, dist.get_world_size())
        check_rank_by_rank(output, AG_GROUP_GEMM.reference(data), limit)
        if number == 0:
            operands, options = AG_GROUP_GEMM.arguments(data, ctx)
            tuned_now = ag_group_gemm.tuning_count > before
            report_tuning(ag_group_gemm, args.autotune, tuned_now, *operands, **options)
    report_passed(f"{layer}, {args.dtype}, {shape_of(layer, args.M)}")


def perf(
    args: argparse.Namespace,
    layer: str,
    data: Operands,
    ctx: MoEAllGatherGroupGEMMTensorParallelContext,
) -> None:
    check(args, layer, data, ctx)
    rounds, warmup = (max(1, args.iters), args.warmup) if is_cuda() else (1, 0)
    title = f"{layer}: {shape_of(layer, args.M)}"
    report_perf(
        AG_GROUP_GEMM, lambda: run(args, data, ctx), data, ctx, args, title, rounds, warmup,
        "ag_moe_perf",
    )  # fmt: skip


CASES = {"check": check, "perf": perf}


def main() -> None:
    args = get_args()
    with on_ranks(args.seed):
        dtype = dtype_named(args.dtype)
        for layer in LAYERS if args.layer is None else [args.layer]:
            shape = shape_of(layer, args.M)
            data = AG_GROUP_GEMM.operands(shape, dtype, dist.get_world_size())
            with AG_GROUP_GEMM.context(shape, dtype) as ctx:
                CASES[args.case](args, layer, data, ctx)
            del data


if __name__ == "__main__":
    main()
