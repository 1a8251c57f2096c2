"""Scripts of ops that end a mixture-of-experts layer: options, data, a check against products in
fp32, and a table of times beside the peers and the limit."""

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
    check_by_turns,
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
"""By which sizes, and the number of experts, are divided for the interpreter."""
_CHUNKS, _CPU_ROUNDS = 4, 3


def make_parser(description: str | None) -> ScriptParser:
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_other_name("--check", "check")
    flag = argparse.BooleanOptionalAction
    for name, help_ in (
        ("M", "tokens"),
        ("N", "hidden size: columns of the result"),
        ("K", "intermediate size, of all ranks"),
        ("E", "experts"),
        ("TOPK", "experts of a token"),
    ):
        parser.add_argument(name, type=int, help=help_)
    parser.add_dtype("float16")
    parser.add_rounds(iters=100, warmup=10)
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--n_chunks", type=int, help="fix the chunks of columns; default: tuned")
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--debug", action="store_true", help="operands are constant")
    parser.add_argument("--debug_sync", action="store_true", help="wait for the device after calls")
    parser.add_argument("--seed", type=int, default=42, help="of the data")
    return parser


def shape_of(args: argparse.Namespace) -> GroupedShape:
    """As the command line asks for, scaled on CPU ranks; M and K are cut to multiples of the
    ranks."""
    size = dist.get_world_size()
    scale, experts = (1, 1) if is_cuda() else (CPU_SCALE, CPU_EXPERTS_SCALE)
    M, K = (max(1, each // scale // size) * size for each in (args.M, args.K))
    return GroupedShape(M, max(1, args.N // scale), K, max(1, args.E // experts), args.TOPK)


class Script:
    """An op, as the command line asks for it; ``alone``: the one without overlap."""

    def __init__(
        self,
        info: MoEReduceOpInfo,
        alone: Callable[..., torch.Tensor],
        args: argparse.Namespace,
        ctx: Any,
    ) -> None:
        self.info, self.alone, self.args, self.ctx = info, alone, args, ctx
        self.fixed = {} if args.n_chunks is None else {"n_chunks": args.n_chunks}

    def operands(self, shape: GroupedShape) -> Operands:
        """The case's; with ``--debug``, constant ones. Collective."""
        size, rank = dist.get_world_size(), dist.get_rank()
        data = self.info.operands(shape, dtype_named(self.args.dtype), size)
        if self.args.debug:
            data["x"].fill_((rank + 1) / 10)
            data["weights"].fill_(1 / data["weights"].shape[1])
        return data

    def run(self, data: Operands) -> torch.Tensor:
        """One call."""
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
        """Compare one call with the reference; and one in chunks, and one without overlap."""
        operands, _ = self.info.arguments(data, self.ctx)
        tiles = grouped_tiles()[0]
        expected = self.info.reference(data)
        tolerance = self.info.tolerance(expected.dtype, dist.get_world_size())
        for C in (
            self.run(data),
            self.info.op.fn(*operands, n_chunks=_CHUNKS, config=tiles),
            self.alone(*operands[:4], n_chunks=_CHUNKS, config=tiles),
        ):
            check_by_turns(C, expected, tolerance)

    def report_tuning(self, data: Operands) -> None:
        """Say which config is in use and where it came from."""
        op = self.info.op
        operands, _ = self.info.arguments(data, self.ctx)
        report_tuning(op, self.args.autotune, op.tuning_count > 0, *operands, **self.fixed)

    def perf(self, data: Operands, shape: GroupedShape) -> None:
        """Times of the op, its parts and its peers."""
        rounds, warmup = max(2, self.args.iters), self.args.warmup
        if not is_cuda():
            rounds, warmup = min(rounds, _CPU_ROUNDS), min(warmup, 1)
        report_perf(
            self.info, lambda: self.run(data), data, self.ctx, self.args, str(shape), rounds, warmup
        )


def main(
    info: MoEReduceOpInfo, alone: Callable[..., torch.Tensor], args: argparse.Namespace
) -> None:
    """All of a script."""
    with on_ranks(args.seed):
        shape = shape_of(args)
        with info.context(shape, dtype_named(args.dtype)) as ctx:
            script = Script(info, alone, args, ctx)
            data = script.operands(shape)
            script.check(data)
            script.report_tuning(data)
            report_passed(f"{args.dtype}, {shape}")
            if args.case == "perf" or args.profile:
                script.perf(data, shape)
