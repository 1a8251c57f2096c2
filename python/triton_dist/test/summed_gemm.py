"""Common parts of the scripts for GEMM-ReduceScatter and GEMM-AllReduce.

Options, data, a check against a product and sum in fp32, and a table of times next to the baselines
and the limit.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    ScriptParser,
    at_least,
    check_rank_by_rank,
    dtype_named,
    report_passed,
    report_perf,
    report_tuning,
)
from triton_dist.testing.opinfo.base import Operands
from triton_dist.testing.opinfo.gemm import Shape, SummedGEMMOpInfo

CPU_SCALE = 128
"""Divisor of the sizes for the interpreter."""


@dataclass(frozen=True)
class Script:
    """An op with the options of the command line."""

    info: SummedGEMMOpInfo
    options: Mapping[str, Any]
    """Arguments of a call other than operands and tunables."""
    fixed: Mapping[str, Any]
    """Tunables that the command line sets."""


def make_parser(description: str | None) -> ScriptParser:
    """Return a parser with the options of both scripts, except the shape."""
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_alias("--check", "check")
    flag = argparse.BooleanOptionalAction
    parser.add_dtype("bfloat16")
    parser.add_rounds(iters=15, warmup=3)
    parser.add_argument("--trans_b", action=flag, default=True, help="make B column-major")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument(
        "--verify-iters", type=at_least(1), default=5, help="number of rounds of check"
    )
    parser.add_argument("--persistent", action=flag, help="choose the kernel; default: tuned")
    parser.add_argument("--has_bias", action="store_true", help="add a bias")
    parser.add_argument("--seed", type=int, default=42, help="seed of the data")
    return parser


def make_operands(script: Script, args: argparse.Namespace, shape: Shape) -> Operands:
    """Return operands with the layout of B and the bias of the command line. Collective."""
    return script.info.operands(
        shape, dtype_named(args.dtype), dist.get_world_size(),
        column_major=args.trans_b, has_bias=args.has_bias,
    )  # fmt: skip


def run(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> torch.Tensor:
    """Call the op with the options of the command line."""
    op, fixed = script.info.op, dict(script.fixed)
    operands, options = script.info.arguments(data, ctx)
    output: torch.Tensor
    if args.autotune:
        overwrite = {"autotune_allow_arg_overwrite": True} if fixed else {}
        output = op(*operands, **options, **script.options, **fixed, **overwrite)
    else:
        persistent = fixed.setdefault("persistent", current_device().prefers_descriptors)
        tiles = get_config_space(persistent)[0]
        output = op.fn(*operands, gemm_config=tiles, **options, **script.options, **fixed)
    return output


def check(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Compare one call with the reference, on one rank after the other."""
    C = run(script, args, data, ctx)
    expected = script.info.reference(data)
    check_rank_by_rank(C, expected, script.info.tolerance(C.dtype, dist.get_world_size()))


def report_check(args: argparse.Namespace, shape: Shape) -> None:
    report_passed(f"{args.dtype}, {shape}")


def perf(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Check one call, then time the op, its parts and its baselines."""
    check(script, args, data, ctx)
    report_config(script, args, data, ctx)
    (M, K), N, size = data["A"].shape, data["B"].shape[1], dist.get_world_size()
    report_perf(
        script.info, lambda: run(script, args, data, ctx), data, ctx, args, f"{M}x{N}x{K * size}",
        max(2, args.iters), args.warmup,
    )  # fmt: skip


def report_config(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Print the config in use and its origin, unless the command line sets tunables."""
    if not script.fixed or not args.autotune:
        op = script.info.op
        operands, options = script.info.arguments(data, ctx)
        tuned_now = op.tuning_count > 0
        report_tuning(op, args.autotune, tuned_now, *operands, **options, **script.options)
