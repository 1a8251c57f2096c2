"""Expert-parallel dispatch and combine of many tokens on all ranks:
``bash scripts/launch.sh test_ep_a2a.py -M 8192 -N 7168 --topk 8 --check``.

``check``: compare both ops with PyTorch's all-to-all. ``perf``: time them next to all-gather and
reduce-scatter. On CPU ranks, sizes are reduced for the interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import EPContext, create_ep_context, ep_combine, ep_dispatch
from triton_dist.test.nvidia.ep_a2a_utils import (
    dequant_fp8_bf16,
    torch_ll_combine,
    torch_ll_dispatch,
)
from triton_dist.test.utils import (
    TIMES_NOT_MEANINGFUL,
    ScriptParser,
    at_least,
    check_rank_by_rank,
    dtype_named,
    initialized_ranks,
    profile,
    report_passed,
    report_tuning,
)
from triton_dist.testing.assertions import assert_bitwise_equal
from triton_dist.testing.opinfo.base import tolerance
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, is_cuda


def make_parser(description: str | None, M: int) -> ScriptParser:
    parser = ScriptParser(description)
    for option, default, help_ in (
        ("-M", M, "largest number of tokens of a rank"),
        ("-N", 7168, "elements of a token"),
        ("-G", 256, "number of experts over all ranks"),
        ("--topk", 8, "number of experts that a token chooses"),
        ("--verify-iters", 5, "number of rounds of --case check"),
    ):
        parser.add_argument(option, type=at_least(1), default=default, help=help_)
    parser.add_argument("--drop_ratio", type=float, default=0.1, help="share of masked choices")
    parser.add_rounds(iters=20, warmup=5)
    parser.add_dtype("bfloat16")
    parser.add_common_options("autotune", "profile", "seed")
    # Options of Triton-distributed's scripts without effect.
    for option in ("--rounds", "--bench_iters", "--sm_margin", "--weight_dtype"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    return parser


def get_args() -> argparse.Namespace:
    parser = make_parser(__doc__, M=4096)
    for option in ("has_weight", "with-scatter-indices", "enable-local-combine", "use_aot"):
        parser.add_argument(f"--{option}", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.use_aot:
        parser.error("--use_aot: kernels are compiled at the first call, or come from a pack")
    return args


def run_round(
    args: argparse.Namespace, ctx: EPContext, quantise: bool, tokens: int, is_first: bool
) -> None:
    """Compare a dispatch (bit by bit) and a combine (within a tolerance) with PyTorch's all-to-all.
    The first round also prints the configs and, for ``perf``, times."""
    group, device, tune = dist.group.WORLD, ctx.device.torch_device, {"autotune": args.autotune}
    assert group is not None
    x = torch.rand(tokens, ctx.hidden, device=device).to(ctx.dtype)
    ids = torch.rand(tokens, ctx.num_experts, device=device).argsort(1)[:, : ctx.topk].int()
    ids[torch.rand(ids.shape, device=device) < args.drop_ratio] = -1
    weights = torch.rand(ids.shape, device=device).softmax(1)

    tuned = ep_dispatch.num_tunings, ep_combine.num_tunings
    operands = (x, ids, ctx, weights, None, quantise)
    received = ep_dispatch(*operands, **tune)
    found = received.expanded(received.rows.new_empty(received.num_positions(), ctx.hidden))
    expected = torch_ll_dispatch(group, x, ids, ctx.num_experts, 128, quantise)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), "only one dispatch has scales"
        if one is not None and other is not None:
            assert_bitwise_equal(one.view(torch.uint8), other.view(torch.uint8))
    y = dequant_fp8_bf16(*expected)
    out = ep_combine(y, received, ctx, **tune)
    expected_sum = torch_ll_combine(group, y, ids, weights, ctx.num_experts)
    check_rank_by_rank(out, expected_sum, tolerance(ctx.dtype, ctx.num_ranks))
    if not is_first:
        return

    tuned_now = ep_dispatch.num_tunings > tuned[0], ep_combine.num_tunings > tuned[1]
    report_tuning(ep_dispatch, args.autotune, tuned_now[0], *operands)
    report_tuning(ep_combine, args.autotune, tuned_now[1], y, received, ctx)
    if args.case == "perf":
        calls: dict[str, Callable[[], object]] = {
            "ep_dispatch": lambda: ep_dispatch(*operands, **tune),
            "all-gather": lambda: ep_dispatch.fn(*operands, algorithm="collective"),
            "ep_combine": lambda: ep_combine(y, received, ctx, **tune),
            "reduce-scatter": lambda: ep_combine.fn(y, received, ctx, algorithm="collective"),
        }
        rounds, warmup = (args.iters, args.warmup) if is_cuda() else (1, 0)
        graphs = {name: capture_graph(call) for name, call in calls.items()}
        dist_print("slowest rank, cold cache, median" if is_cuda() else TIMES_NOT_MEANINGFUL)
        for name, sample in time_interleaved(graphs, rounds=rounds, warmup_rounds=warmup).items():
            dist_print(f"{name:32}{sample.median:10.3f} ms")
        profile("ep_a2a_perf", args.profile, calls["ep_dispatch"], calls["ep_combine"])


def main(args: argparse.Namespace, quantise: bool, cpu_scale: int) -> None:
    """Check both ops with random numbers of tokens; ``cpu_scale`` divides M on CPU ranks."""
    with initialized_ranks(args.seed):
        rank, size, dtype = dist.get_rank(), dist.get_world_size(), dtype_named(args.dtype)
        M, N, experts = args.M, args.N, args.G
        if not is_cuda():
            M, N, experts = max(1, M // cpu_scale), 128, max(args.topk, experts // 32)
            experts += -experts % size
        with create_ep_context(rank, size, size, M, N, experts, args.topk, dtype) as ctx:
            for number in range(args.verify_iters if args.case == "check" else 1):
                tokens = int(torch.randint(1, M + 1, ())) if number else M
                run_round(args, ctx, quantise, tokens, is_first=number == 0)
            ctx.check()
            details = f"{M} tokens, hidden {N}, {experts} experts, top-{args.topk}"
            report_passed(f"{args.dtype}, {details}")


if __name__ == "__main__":
    main(get_args(), quantise=False, cpu_scale=256)
