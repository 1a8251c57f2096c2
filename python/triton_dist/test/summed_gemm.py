"""Common parts of the scripts for GEMM-ReduceScatter and GEMM-AllReduce: options and calls."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import Script, ScriptParser, at_least
from triton_dist.testing.opinfo.base import Operands

CPU_SCALE = 128
"""Divisor of the sizes for the interpreter."""


def make_parser(description: str | None, M: int) -> ScriptParser:
    """Return a parser with the options of both scripts. ``M`` is the default of ``--M``."""
    parser = ScriptParser(description)
    for option, default, help_ in (
        ("M", M, "rows of A"),
        ("N", 8192, "columns of B"),
        ("K", 28672, "K over all ranks"),
    ):
        parser.add_argument(f"-{option}", f"--{option}", type=int, default=default, help=help_)
    parser.add_dtype("bfloat16", has_fp8=True)
    parser.add_rounds(iters=15, warmup=3)
    parser.add_common_options("trans_b", "autotune", "profile", "persistent", "seed")
    parser.add_argument(
        "--verify-iters", type=at_least(1), default=5, help="number of rounds of --case check"
    )
    parser.add_argument("--has_bias", action="store_true", help="add a bias")
    return parser


def fixed_tunables(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the tunables that the command line sets."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


class SummedGEMMScript(Script):
    """The script of a GEMM with a sum over ranks."""

    def operands(self, shape: Any, **layout: Any) -> Operands:
        """Return operands, with the layout of B and the bias of the command line. Collective."""
        args = self.args
        return super().operands(shape, column_major=args.trans_b, has_bias=args.has_bias)

    def run(self, data: Operands) -> torch.Tensor:
        operands, options = self.arguments(data)
        fixed = dict(self.fixed)
        output: torch.Tensor
        if self.args.autotune:
            overwrite = {"autotune_allow_arg_overwrite": True} if fixed else {}
            output = self.op(*operands, **options, **fixed, **overwrite)
        else:
            persistent = fixed.setdefault("persistent", current_device().prefers_descriptors)
            tiles = get_config_space(persistent)[0]
            output = self.op.fn(*operands, gemm_config=tiles, **options, **fixed)
        return output

    def check_and_time(self, shape: Any) -> None:
        """Check one call, then time the op, its parts and its baselines."""
        data = self.operands(shape)
        self.check(data)
        self.report_tuning(data)
        (M, K), N, size = data["A"].shape, data["B"].shape[1], dist.get_world_size()
        self.perf(data, f"{M}x{N}x{K * size}", max(2, self.args.iters), self.args.warmup)
