"""What the scripts of GEMM-ReduceScatter and GEMM-AllReduce share: options, data, a check against
a product and sum in fp32, and a table of times beside the peers and the limit."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.device import current_device
from triton_dist.test.options import ScriptParser
from triton_dist.test.report import report_passed, report_times
from triton_dist.test.utils import assert_allclose, dtype_named
from triton_dist.testing.overlap import Candidate
from triton_dist.testing.timing import captured, interleaved
from triton_dist.tune import AutoTuner
from triton_dist.utils import dist_print, rand_tensor

CPU_SCALE = 64
"""By which sizes are divided for the interpreter."""
# atol = rtol: W parts are rounded to the dtype, and so is their sum.
TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2, torch.float32: 1e-3}


@dataclass(frozen=True)
class Operands:
    """A [M, K_per_rank], B [K_per_rank, N], a bias [N] or none."""

    A: torch.Tensor
    B: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True)
class Script:
    """What differs between the ops."""

    op: AutoTuner
    reduction: str
    """Its collective, for people."""
    serial: str
    options: Mapping[str, Any]
    """What a call has beside operands and tunables."""
    fixed: Mapping[str, Any]
    """Tunables that the command line fixes."""
    expected: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    peers: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], Mapping[str, Candidate]]

    @property
    def name(self) -> str:
        return str(self.op.fn.__name__)


def make_parser(description: str | None) -> ScriptParser:
    """Options of both scripts, but those of the shape."""
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_other_name("--check", "check")
    flag = argparse.BooleanOptionalAction
    parser.add_dtype("bfloat16")
    parser.add_rounds(iters=15, warmup=3)
    parser.add_argument("--trans_b", action=flag, default=True, help="B column-major")
    parser.add_argument("--autotune", action=flag, default=True)
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    parser.add_argument("--verify-iters", type=int, default=5, help="rounds of check")
    parser.add_argument("--persistent", action=flag, help="fix the kind of kernel; default: tuned")
    parser.add_argument("--has_bias", action="store_true")
    parser.add_argument("--seed", type=int, default=42, help="of the data")
    return parser


def make_operands(args: argparse.Namespace, M: int, N: int, K: int) -> Operands:
    """A = U(-1, 1) * (rank + 1) * 0.01 [M, K], B = U(-1, 1) [K, N], column-major if ``trans_b``,
    and a bias [N], the same on all ranks, if there is to be one. Collective."""
    dtype, device = dtype_named(args.dtype), current_device().torch_device
    A = rand_tensor([M, K], dtype, device) * ((dist.get_rank() + 1) * 0.01)
    B = rand_tensor([N, K], dtype, device).T if args.trans_b else rand_tensor([K, N], dtype, device)
    if not args.has_bias:
        return Operands(A, B, None)
    bias = rand_tensor([N], dtype, device)
    dist.broadcast(bias, 0)
    return Operands(A, B, bias)


def run(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> torch.Tensor:
    """One call as the command line asks for it."""
    fixed = dict(script.fixed)
    output: torch.Tensor
    if args.autotune:
        overwrite = {"autotune_allow_arg_overwrite": True} if fixed else {}
        output = script.op(
            data.A, data.B, ctx, bias=data.bias, **script.options, **fixed, **overwrite
        )
    else:
        persistent = fixed.setdefault("persistent", current_device().prefers_descriptors)
        tiles = get_config_space(persistent)[0]
        output = script.op.fn(
            data.A, data.B, ctx, gemm_config=tiles, bias=data.bias, **script.options, **fixed
        )
    return output


def check(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Compare one call with the reference, one rank after the other."""
    C = run(script, args, data, ctx)
    expected = script.expected(data.A, data.B, data.bias)
    tolerance = TOLERANCE[data.A.dtype]
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if turn == dist.get_rank():
            assert_allclose(C, expected, rtol=tolerance, atol=tolerance)


def report_check(args: argparse.Namespace, M: int, N: int, K: int) -> None:
    report_passed(f"{args.dtype}, {M}x{N}x{K * dist.get_world_size()}")


def perf(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Times of the op, its parts and its peers, after one checked call."""
    check(script, args, data, ctx)
    report_tuning(script, args, data, ctx)

    def ours() -> torch.Tensor:
        return run(script, args, data, ctx)

    candidates = {
        script.name: Candidate("own", ours),
        **script.peers(data.A, data.B, data.bias),
    }
    _report_table(script, args, data, candidates)
    with group_profile(f"{script.name}_perf", args.profile):
        for _ in range(20 if args.profile else 0):
            ours()


def report_tuning(script: Script, args: argparse.Namespace, data: Operands, ctx: Any) -> None:
    """Say which config is in use and where it came from."""
    if not args.autotune:
        dist_print("no tuning: the default config")
    elif not script.fixed:
        origin = "tuned now" if script.op.tuning_count else "from the cache, no tuning"
        config = script.op.best_config(data.A, data.B, ctx, bias=data.bias, **script.options)
        dist_print(f"config ({origin}): {config}")


def _report_table(
    script: Script,
    args: argparse.Namespace,
    data: Operands,
    candidates: Mapping[str, Candidate],
) -> None:
    calls = {name: captured(each.call) for name, each in candidates.items()}
    samples = interleaved(calls, rounds=max(2, args.iters), warmup_rounds=args.warmup)
    (M, K), N, size = data.A.shape, data.B.shape[1], dist.get_world_size()
    title = f"{M}x{N}x{K * size} {args.dtype} on {size} ranks"
    report_times(title, candidates, samples, script.serial, script.reduction)
