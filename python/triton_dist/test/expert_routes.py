"""Common parts of the scripts for expert-parallel dispatch and combine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import EPContext, create_ep_context, ep_combine, ep_dispatch
from triton_dist.kernels.nvidia.expert_parallel import Received
from triton_dist.runtime.device import current_device
from triton_dist.test.nvidia.ep_a2a_utils import (
    dequant_fp8_bf16,
    torch_ll_combine,
    torch_ll_dispatch,
)
from triton_dist.test.utils import (
    NO_TIMES,
    ScriptParser,
    at_least,
    check_rank_by_rank,
    dtype_named,
    on_ranks,
    profile,
    report_passed,
    report_tuning,
)
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.timing import captured, interleaved
from triton_dist.tune import AutoTuner
from triton_dist.utils import dist_print, is_cuda

IGNORED = ("--rounds", "--bench_iters", "--sm_margin")


def make_parser(description: str | None, M: int) -> ScriptParser:
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_alias("--check")
    for option, default, help_ in (
        ("-M", M, "largest number of tokens of a rank"),
        ("-N", 7168, "elements of a token"),
        ("-G", 256, "experts of all ranks"),
        ("--topk", 8, "experts of a token"),
        ("--verify-iters", 5, "rounds of check"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, help=help_)
    parser.add_argument("--drop_ratio", type=float, default=0.1, help="share of masked choices")
    parser.add_rounds(iters=20, warmup=5)
    parser.add_dtype("bfloat16")
    parser.add_common("autotune", "profile", "seed")
    for option in IGNORED:
        parser.add_argument(option, help=argparse.SUPPRESS)
    return parser


class EPScript:
    """Both ops with the options of the command line, and their data."""

    def __init__(self, args: argparse.Namespace, ctx: EPContext, quantise: bool) -> None:
        self.args, self.ctx, self.quantise = args, ctx, quantise
        self.tuned_before = ep_dispatch.tuning_count, ep_combine.tuning_count

    def draw(self, tokens: int) -> None:
        """Draw random tokens, ids without repetition, and weights."""
        ctx, device = self.ctx, self.ctx.device.torch_device
        self.x = torch.rand(tokens, ctx.hidden, device=device).to(ctx.dtype)
        ids = torch.rand(tokens, ctx.num_experts, device=device).argsort(1)[:, : ctx.topk]
        masked = torch.rand(ids.shape, device=device) < self.args.drop_ratio
        self.ids = ids.masked_fill(masked, -1).int()
        self.weights = torch.rand(ids.shape, device=device).softmax(1)

    def dispatch(self, algorithm: str | None = None) -> Received:
        operands = (self.x, self.ids, self.ctx, self.weights, None, self.quantise)
        if algorithm is not None:
            return ep_dispatch.fn(*operands, algorithm=algorithm)
        return ep_dispatch(*operands, autotune=self.args.autotune)

    def combine(
        self, y: torch.Tensor, received: Received, algorithm: str | None = None
    ) -> torch.Tensor:
        if algorithm is not None:
            return ep_combine.fn(y, received, self.ctx, algorithm=algorithm)
        return ep_combine(y, received, self.ctx, autotune=self.args.autotune)

    def check(self) -> tuple[torch.Tensor, Received]:
        """Compare a dispatch bitwise, and a combine within its tolerance, with PyTorch."""
        experts, group = self.ctx.num_experts, dist.group.WORLD
        assert group is not None
        rows, scales = torch_ll_dispatch(group, self.x, self.ids, experts, 128, self.quantise)
        received = self.dispatch()
        out = received.rows.new_empty(received.num_positions(), self.ctx.hidden)
        found, found_scales = received.expanded(out)
        assert_bitwise_equal(found.view(torch.uint8), rows.view(torch.uint8))
        if scales is not None and found_scales is not None:
            assert_bitwise_equal(found_scales, scales)
        y = dequant_fp8_bf16(rows, scales)
        expected = torch_ll_combine(group, y, self.ids, self.weights, experts)
        limit = tolerance(self.ctx.dtype, self.ctx.num_ranks)
        check_rank_by_rank(self.combine(y, received), expected, limit)
        return y, received

    def report_tuning(self, y: torch.Tensor, received: Received) -> None:
        calls: dict[AutoTuner[..., Any], tuple[Any, ...]] = {
            ep_dispatch: (self.x, self.ids, self.ctx, self.weights, None, self.quantise),
            ep_combine: (y, received, self.ctx),
        }
        for (op, operands), before in zip(calls.items(), self.tuned_before, strict=True):
            report_tuning(op, self.args.autotune, op.tuning_count > before, *operands)

    def perf(self, y: torch.Tensor, received: Received) -> None:
        """Time both ops in CUDA graphs next to all-gather and reduce-scatter."""
        calls: dict[str, Callable[[], object]] = {
            "ep_dispatch": self.dispatch,
            "all-gather": lambda: self.dispatch("collective"),
            "ep_combine": lambda: self.combine(y, received),
            "reduce-scatter": lambda: self.combine(y, received, "collective"),
        }
        rounds, warmup = (self.args.iters, self.args.warmup) if is_cuda() else (1, 0)
        graphs = {name: captured(call) for name, call in calls.items()}
        samples = interleaved(graphs, rounds=rounds, warmup_rounds=warmup)
        note = "slowest rank, cold cache, median" if is_cuda() else NO_TIMES
        dist_print(f"{note}\n{'':32}{'ms':>10}")
        for name, sample in samples.items():
            dist_print(f"{name:32}{sample.median:10.3f}")
        profile("ep_a2a_perf", self.args.profile, self.dispatch, calls["ep_combine"])


def main(args: argparse.Namespace, quantise: bool, cpu_scale: int) -> None:
    """Check both ops with random numbers of tokens, report the tuning, and time them.

    ``cpu_scale`` divides the tokens for the interpreter.
    """
    with on_ranks(args.seed):
        rank, size = dist.get_rank(), dist.get_world_size()
        M, N, experts = args.M, args.N, args.G
        if not is_cuda():
            M, N, experts = max(1, M // cpu_scale), 128, max(args.topk, experts // 32)
            experts += -experts % size
        dtype = dtype_named(args.dtype)
        with create_ep_context(rank, size, size, M, N, experts, args.topk, dtype) as ctx:
            script = EPScript(args, ctx, quantise)
            for number in range(args.verify_iters if args.case == "check" else 1):
                few = int(torch.randint(1, M + 1, ()))
                script.draw(few if number else M)
                y, received = script.check()
                if number == 0:
                    script.report_tuning(y, received)
            ctx.check()
            details = f"{M} tokens, hidden {N}, {experts} experts, top-{args.topk}"
            report_passed(f"{args.dtype}, {details}")
            if args.case == "perf":
                script.perf(y, received)
            current_device().synchronize()
