"""Common parts of the scripts for the ops that end an MoE layer.

Options, data, a check against products in fp32, and a table of times next to the baselines and the
limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.common.moe.spaces import grouped_tiles
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    ScriptParser,
    check_rank_by_rank,
    dtype_named,
    on_ranks,
    report_passed,
    report_perf,
    report_tuning,
)
from triton_dist.testing.opinfo.base import Operands
from triton_dist.testing.opinfo.moe import GroupedShape
from triton_dist.testing.opinfo.moe_reduce import MoEReduceOpInfo
from triton_dist.utils import is_cuda

CPU_SCALE, CPU_EXPERTS_SCALE = 64, 8
"""Divisors of the sizes and of the number of experts for the interpreter."""
_CHUNKS, _CPU_ROUNDS = 4, 3


def make_parser(description: str | None) -> ScriptParser:
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_alias("--check", "check")
    flag = argparse.BooleanOptionalAction
    for name, help_ in (
        ("M", "number of tokens"),
        ("N", "hidden size: columns of the result"),
        ("K", "intermediate size over all ranks"),
        ("E", "number of experts"),
        ("TOPK", "experts per token"),
    ):
        parser.add_argument(name, type=int, help=help_)
    parser.add_dtype("float16")
    parser.add_rounds(iters=100, warmup=10)
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--n_chunks", type=int, help="number of column chunks; default: tuned")
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--debug", action="store_true", help="use constant operands")
    parser.add_argument(
        "--debug_sync", action="store_true", help="synchronise with the device after each call"
    )
    parser.add_argument("--seed", type=int, default=42, help="seed of the data")
    return parser


def shape_of(args: argparse.Namespace) -> GroupedShape:
    """Return the shape of the command line, reduced on CPU ranks; M and K are multiples of the
    ranks."""
    size = dist.get_world_size()
    scale, experts = (1, 1) if is_cuda() else (CPU_SCALE, CPU_EXPERTS_SCALE)
    M, K = (max(1, each // scale // size) * size for each in (args.M, args.K))
    return GroupedShape(M, max(1, args.N // scale), K, max(1, args.E // experts), args.TOPK)


class Script:
    """An op with the options of the command line; ``unfused`` is the op without overlap."""

    def __init__(
        self,
        info: MoEReduceOpInfo,
        unfused: Callable[..., torch.Tensor],
        args: argparse.Namespace,
        ctx: Any,
    ) -> None:
        self.info, self.unfused, self.args, self.ctx = info, unfused, args, ctx
        self.fixed = {} if args.n_chunks is None else {"n_chunks": args.n_chunks}

    def operands(self, shape: GroupedShape) -> Operands:
        """Return the operands, constant with ``--debug``. Collective."""
        size, rank = dist.get_world_size(), dist.get_rank()
        data = self.info.operands(shape, dtype_named(self.args.dtype), size)
        if self.args.debug:
            data["x"].fill_((rank + 1) / 10)
            data["weights"].fill_(1 / data["weights"].shape[1])
        return data

    def run(self, data: Operands) -> torch.Tensor:
        """Call the op with the options of the command line."""
        operands, _ = self.info.arguments(data, self.ctx)
        output: torch.Tensor
        if self.args.autotune:
            output = self.info.op(*operands, **self.fixed)
        else:
            output = self.info.op.fn(*operands, gemm_config=grouped_tiles()[0], **self.fixed)
        if self.args.debug_sync:
            current_device().synchronize()
        return output

    def check(self, data: Operands) -> None:
        """Compare a call, a call in chunks and a call without overlap with the reference."""
        operands, _ = self.info.arguments(data, self.ctx)
        tiles = grouped_tiles()[0]
        expected = self.info.reference(data)
        tolerance = self.info.tolerance(expected.dtype, dist.get_world_size())
        for C in (
            self.run(data),
            self.info.op.fn(*operands, n_chunks=_CHUNKS, config=tiles),
            self.unfused(*operands[:4], n_chunks=_CHUNKS, config=tiles),
        ):
            check_rank_by_rank(C, expected, tolerance)

    def report_tuning(self, data: Operands) -> None:
        """Print the config in use and its origin."""
        op = self.info.op
        operands, _ = self.info.arguments(data, self.ctx)
        report_tuning(op, self.args.autotune, op.tuning_count > 0, *operands, **self.fixed)

    def perf(self, data: Operands, shape: GroupedShape) -> None:
        """Time the op, its parts and its baselines."""
        rounds, warmup = max(2, self.args.iters), self.args.warmup
        if not is_cuda():
            rounds, warmup = min(rounds, _CPU_ROUNDS), min(warmup, 1)
        report_perf(
            self.info, lambda: self.run(data), data, self.ctx, self.args, str(shape), rounds, warmup
        )


def main(
    info: MoEReduceOpInfo, unfused: Callable[..., torch.Tensor], args: argparse.Namespace
) -> None:
    """Run a script: check, report the tuning, and time the op."""
    with on_ranks(args.seed):
        shape = shape_of(args)
        with info.context(shape, dtype_named(args.dtype)) as ctx:
            script = Script(info, unfused, args, ctx)
            data = script.operands(shape)
            script.check(data)
            script.report_tuning(data)
            report_passed(f"{args.dtype}, {shape}")
            if args.case == "perf" or args.profile:
                script.perf(data, shape)
