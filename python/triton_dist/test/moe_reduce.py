"""Common parts of the scripts for the ops that end an MoE layer (grouped GEMM and sum)."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    Script,
    ScriptParser,
    dtype_named,
    initialized_ranks,
    report_passed,
)
from triton_dist.testing.opinfo.base import Operands
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.moe_reduce import MoEReduceOpInfo
from triton_dist.utils import is_cuda

CPU_SCALE, CPU_EXPERTS_SCALE = 64, 8
"""Divisors of the sizes and of the number of experts for the interpreter."""
_CHUNKS, _CPU_ROUNDS = 4, 3


def make_parser(description: str | None) -> ScriptParser:
    parser = ScriptParser(description)
    for name, help_ in (
        ("M", "number of tokens"),
        ("N", "hidden size: columns of the result"),
        ("K", "intermediate size over all ranks"),
        ("E", "number of experts"),
        ("TOPK", "experts per token"),
    ):
        parser.add_argument(name, type=int, help=help_)
    parser.add_dtype("float16", has_fp8=True)
    parser.add_rounds(iters=100, warmup=10)
    parser.add_common_options("autotune", "profile", "seed")
    parser.add_argument("--n_chunks", type=int, help="number of chunks of columns; default: tuned")
    parser.add_argument("--debug", action="store_true", help="use constant operands")
    parser.add_argument(
        "--debug_sync", action="store_true", help="synchronise with the device after each call"
    )
    return parser


def shape_of(args: argparse.Namespace) -> GroupedShape:
    """Return the shape of the command line, reduced on CPU ranks. M and K are rounded to multiples
    of the number of ranks."""
    size = dist.get_world_size()
    scale, experts = (1, 1) if is_cuda() else (CPU_SCALE, CPU_EXPERTS_SCALE)
    M, K = (max(1, each // scale // size) * size for each in (args.M, args.K))
    return GroupedShape(M, max(1, args.N // scale), K, max(1, args.E // experts), args.TOPK)


class MoEReduceScript(Script):
    """The script of an op that ends an MoE layer."""

    def operands(self, shape: GroupedShape) -> Operands:  # type: ignore[override]
        """Return the operands, constant with ``--debug``. Collective."""
        data = super().operands(shape)
        if self.args.debug:
            data["x"].fill_((dist.get_rank() + 1) / 10)
            data["weights"].fill_(1 / data["weights"].shape[1])
        return data

    def run(self, data: Operands) -> torch.Tensor:
        operands, options = self.arguments(data)
        output: torch.Tensor
        if self.args.autotune:
            output = self.op(*operands, **options)
        else:
            output = self.op.fn(*operands, gemm_config=grouped_tiles()[0], **options)
        if self.args.debug_sync:
            current_device().synchronize()
        return output


def main(
    info: MoEReduceOpInfo, unfused: Callable[..., torch.Tensor], args: argparse.Namespace
) -> None:
    """Check results, print the config, and for ``--case perf`` time the op. The checked calls are
    the op, the op in ``_CHUNKS`` chunks, and ``unfused``, without overlap."""
    info = info.with_dtype(args.dtype)
    with initialized_ranks(args.seed):
        shape = shape_of(args)
        with info.context(shape, dtype_named(args.dtype)) as ctx:
            options = {} if args.n_chunks is None else {"n_chunks": args.n_chunks}
            script = MoEReduceScript(info, args, ctx, options)
            data = script.operands(shape)
            operands, scales = info.arguments(data, ctx)
            in_chunks = {"n_chunks": _CHUNKS, "config": grouped_tiles()[0]}
            script.check(
                data,
                script.run(data),
                info.op.fn(*operands, **in_chunks, **scales),
                *(() if scales else (unfused(*operands[:4], **in_chunks),)),
            )
            script.report_tuning(data)
            report_passed(f"{args.dtype}, {shape}")
            if args.case == "perf" or args.profile:
                rounds, warmup = max(2, args.iters), args.warmup
                if not is_cuda():
                    rounds, warmup = min(rounds, _CPU_ROUNDS), min(warmup, 1)
                script.perf(data, shape, rounds, warmup)
