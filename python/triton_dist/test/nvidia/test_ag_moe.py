"""AllGather + grouped GEMM on all ranks: ``bash scripts/launch.sh test_ag_moe.py --M 2048``.

For each of five layers, tune the op, compare it with a loop over the experts in torch, and time the
op, its parts and its baselines. ``--check``: compare five times, with new data and routings, and do
not time. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from triton_dist.test.utils import (
    Script,
    ScriptParser,
    dtype_named,
    initialized_ranks,
    report_passed,
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
    parser = ScriptParser(__doc__)
    parser.add_argument("--M", "-M", type=int, default=8192, help="tokens over all ranks")
    parser.add_argument("--layer", choices=list(LAYERS), help="run one layer; default: all")
    parser.add_rounds(iters=10, warmup=5)
    parser.add_dtype("float16", has_fp8=True)
    parser.add_common_options("autotune", "profile", "seed")
    parser.add_argument("--debug", action="store_true", help="tune verbosely")
    return parser.parse_args()


def shape_of(layer: str, M: int) -> GroupedShape:
    """Return the shape, reduced on CPU ranks. Round M and N to multiples of the number of ranks."""
    scale = 1 if is_cuda() else _CPU_SCALE
    return AG_GROUP_GEMM.smaller(GroupedShape(M, *LAYERS[layer]), scale, dist.get_world_size())


class AllGatherGroupGEMMScript(Script):
    """The script of AllGather + grouped GEMM."""

    def run(self, data: Operands) -> torch.Tensor:
        operands, options = self.arguments(data)
        output: torch.Tensor = self.op(
            *operands, **options, autotune=self.args.autotune, autotune_verbose=self.args.debug
        )
        return output


def check(script: Script, data: Operands, title: str) -> None:
    for number in range(_ROUNDS_OF_CHECK if script.args.case == "check" else 1):
        if number:
            script.info.refill(data, script.num_ranks)
            data["full_topk_ids"][number::7] = -1  # like the ids that pad a batch
        script.check(data)
        if number == 0:
            script.report_tuning(data)
    report_passed(title)


def main() -> None:
    args = get_args()
    with initialized_ranks(args.seed):
        for layer in LAYERS if args.layer is None else [args.layer]:
            shape = shape_of(layer, args.M)
            info = AG_GROUP_GEMM.with_dtype(args.dtype)
            with info.context(shape, dtype_named(args.dtype)) as ctx:
                script = AllGatherGroupGEMMScript(info, args, ctx)
                data = script.operands(shape)
                check(script, data, f"{layer}, {args.dtype}, {shape}")
                if args.case == "perf":
                    rounds, warmup = (max(1, args.iters), args.warmup) if is_cuda() else (1, 0)
                    script.perf(data, f"{layer}: {shape}", rounds, warmup, "ag_moe_perf")
            del script, data


if __name__ == "__main__":
    main()
