"""Compare the sequence-parallel ops with NCCL, in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --best 4
    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --ops pre --tokens 8000,16384 \
        --heads 32/32,32/8 --verbose
    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --ops gemm_pre,post_gemm \
        --lengths-random 40 --seed 0

The baseline of the Ulysses ops ("pre", "post") is a permutation, NCCL's all-to-all, and another
permutation. The baseline of the ops with projections ("gemm_pre", "post_gemm") has a GEMM by cuBLAS
in addition. The limit is the time to send a rank's bytes at --link GB/s, or the GEMM alone if that
takes longer. AllGather-attention ("attn") has two baselines: NCCL's all-gather before the
attention, and torch's ``context_parallel``, which is not captured in a graph. Its limit is the
larger of two times: the fastest library's whole attention divided by the ranks, and NCCL's
all-gather.

Before each check, the config runs on NaN, so that memory that it should write contains NaN. Every
result is compared with the baseline. Calls are interleaved, with a cold L2 cache; a sample is the
slowest rank's time. With --lengths-random, the tuned op runs instead of a list of configs.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from overlap.any_m import random_sizes

from triton_dist.kernels.common import libraries
from triton_dist.kernels.nvidia import (
    create_sp_ag_attention_context,
    create_ulysses_context,
    sp_ag_attention,
    ulysses_gemm_pre_attn,
    ulysses_post_attn,
    ulysses_post_attn_gemm,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import attention as library_attention
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import backends
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

LIBRARY, GEMM, TUNED = "library", "GEMM", "tuned"
TOLERANCE = 0.01
"""Maximum error of attention and GEMMs, relative to the largest element. Exchanges are exact."""


class Exchange(NamedTuple):
    """A Ulysses op to measure."""

    name: str
    op: Any
    args: tuple[Any, ...]
    inputs: tuple[torch.Tensor, ...]
    heads: int
    """Number of heads of a token that all ranks together have after the exchange."""
    gemm: Callable[[], torch.Tensor] | None = None
    """The projection alone."""


def config_text(config: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in config.values())


def configs(op: Any, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the configs of our algorithms to measure, by name."""
    number: Counter[str] = Counter()
    chosen = {}
    for config in op.config_space:
        number[config["algorithm"]] += 1
        is_chosen = options.best == 0 or number[config["algorithm"]] <= options.best
        if is_chosen and config["algorithm"] != "collective":
            chosen[config_text(config)] = dict(config)
    return chosen


def is_wrong(
    inputs: Sequence[torch.Tensor], call: Callable[[], Any], expected: Any, tolerance: float
) -> bool:
    """Return whether a call differs from ``expected`` on any rank. Collective."""
    saved = [x.clone() for x in inputs]
    for x in inputs:
        x.fill_(float("nan"))
    for _ in range(2):  # The receive memories of calls alternate.
        call()
    for x, values in zip(inputs, saved, strict=True):
        x.copy_(values)
    worst = 0.0
    for a, b in zip(results_of(call()), results_of(expected), strict=True):
        error = (a.float() - b.float()).abs().nan_to_num(float("inf")).max()
        worst = max(worst, float(error / b.float().abs().max()))
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, not worst <= tolerance)
    return any(verdicts)


def results_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def measure(each: Exchange, limit_us: float, options: argparse.Namespace) -> float:
    """Check and time an op; return its speed relative to the library."""
    calls: dict[str, Callable[[], Any]] = {
        LIBRARY: lambda: each.op.fn(*each.args, algorithm="collective")
    }
    expected = calls[LIBRARY]()
    if options.lengths_random:
        each.op.tune(*each.args)
        candidate_calls = {TUNED: lambda: each.op(*each.args)}
    else:
        candidate_calls = {
            name: lambda c=config: each.op.fn(*each.args, **c)
            for name, config in configs(each.op, options).items()
        }
    for name, call in candidate_calls.items():
        if is_wrong(each.inputs, call, expected, TOLERANCE if each.gemm else 0.0):
            log(f"  WRONG {each.name} {name}")
        else:
            calls[name] = call
    if each.gemm is not None:
        calls[GEMM] = each.gemm
    graphs = {name: capture_graph(call) for name, call in calls.items()}
    samples = time_interleaved(graphs, options.rounds)
    times = {name: sample.median * 1e3 for name, sample in samples.items()}
    limit, library = max(limit_us, times.get(GEMM, 0.0)), times[LIBRARY]
    ours = {name: us for name, us in times.items() if name not in (LIBRARY, GEMM)} or times
    best = min(ours, key=ours.__getitem__)
    found = config_text(each.op.best_config(*each.args)) if best == TUNED else best
    log(
        f"  {each.name:9} {times[best]:8.1f} us ({found}); limit {limit:.1f} (link "
        f"{limit_us:.1f}), {times[best] / limit:.2f} x; library {library:.1f} "
        f"({library / times[best]:.2f} x)"
    )
    if options.verbose:
        for name, microseconds in sorted(times.items(), key=lambda item: item[1]):
            log(f"      {microseconds:8.1f} {name}")
    return library / times[best]


def exchanges(
    local: int, heads: tuple[int, int], hidden: int, ctx: Any, options: argparse.Namespace
) -> Iterator[Exchange]:
    """Yield the ops of ``options`` for ``local`` tokens of a rank."""
    size, dtype, dim = dist.get_world_size(), torch.bfloat16, options.dim
    generator = torch.Generator(current_device().torch_device).manual_seed(dist.get_rank())

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device, dtype=dtype)

    names, sent = options.ops.split(","), heads[0] + 2 * max(heads[1], size)
    rows, columns = heads[0] * dim, (heads[0] + 2 * heads[1]) * dim
    o = random(1, local * size, heads[0] // size, dim)
    if "pre" in names:
        q, k, v = (random(1, local, n, dim) for n in (heads[0], *heads[1:] * 2))
        yield Exchange("pre", ulysses_pre_attn, (q, k, v, ctx), (q, k, v), sent)
    if "post" in names:
        yield Exchange("post", ulysses_post_attn, (o, ctx), (o,), heads[0])
    if "gemm_pre" in names:
        x, B = random(1, local, hidden), random(columns, hidden).T
        dist.broadcast(B.T, 0)
        yield Exchange("gemm_pre", ulysses_gemm_pre_attn, (x, B, ctx), (x,), sent, lambda: x[0] @ B)
    if "post_gemm" in names:
        C, own = random(hidden, rows).T, random(local, rows)
        dist.broadcast(C.T, 0)
        yield Exchange(
            "post_gemm", ulysses_post_attn_gemm, (o, C, ctx), (o,), heads[0], lambda: own @ C
        )


def ulysses(
    tokens: int, heads: tuple[int, int], hidden: int, options: argparse.Namespace
) -> list[float]:
    """Measure the Ulysses ops; return the speed of each relative to the library."""
    rank, size, dim = dist.get_rank(), dist.get_world_size(), options.dim
    local, ratios = tokens // size, []
    with create_ulysses_context(rank, size, size, tokens, *heads, dim, torch.bfloat16) as ctx:
        share = local * dim * 2 * (size - 1) / size / options.link / 1e3
        for each in exchanges(local, heads, hidden, ctx, options):
            ratios.append(measure(each, share * each.heads, options))
        ctx.check()
    return ratios


def attention(tokens: int, heads: tuple[int, int], options: argparse.Namespace) -> list[float]:
    """Measure AllGather-attention; return the speed relative to each call of a baseline."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    device, dim = current_device().torch_device, options.dim
    local = tokens // size // 2 * 2
    q, k, v = (
        torch.randn(1, local, n, dim, device=device, dtype=dtype)
        for n in (heads[0], *heads[1:] * 2)
    )
    whole = [torch.cat([x] * size, 1) for x in (q, k, v)]
    with create_sp_ag_attention_context(
        rank, size, size, local, heads[1], dim, dtype
    ) as ctx, ExitStack() as stack:  # fmt: skip
        calls: dict[str, Callable[[], Any]] = {}
        for backend in backends():
            ours, library = (
                functools.partial(sp_ag_attention.fn, q, k, v, ctx, algorithm=name, backend=backend)
                for name in ("copy_engine", "collective")
            )
            if is_wrong((q, k, v), ours, library(), TOLERANCE):
                log(f"  WRONG {backend}")
            calls[f"copy_engine {backend}"] = capture_graph(ours)
            calls[f"collective {backend}"] = capture_graph(library)
            calls[f"alone {backend}"] = capture_graph(
                lambda b=backend: library_attention(b, *whole, True, None)
            )
        packed = torch.cat([k, v], 2)
        calls["all-gather alone"] = capture_graph(lambda: libraries.all_gather_rows(packed, None))
        if is_cuda():
            others = context_parallel_calls(whole, stack)
            for name, call in others.items():
                try:
                    call()
                    calls[name] = call
                except Exception as failure:  # on all ranks: torch does not support the call
                    log(f"  {name}: {type(failure).__name__}: {str(failure)[:200]}")
        samples = time_interleaved(calls, options.rounds)
        ctx.check()
    times = {each: sample.median * 1e3 for each, sample in samples.items()}
    best = {
        kind: min(time for each, time in times.items() if each.startswith(kind))
        for kind in ("copy_engine", "collective", "alone")
    }
    fastest, limit = best["copy_engine"], max(best["alone"] / size, times["all-gather alone"])
    log(f"  attn  {fastest:8.1f} us; limit {limit:.1f}, {fastest / limit:.2f} x")
    for each, microseconds in times.items():
        log(f"      {microseconds:8.1f} {each} ({microseconds / fastest:.2f} x ours)")
    return [us / fastest for each, us in times.items() if each.startswith(("coll", "context"))]


def context_parallel_calls(
    whole: Sequence[torch.Tensor], stack: ExitStack
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls of torch's causal attention in ``context_parallel``, which ``stack`` enters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [x.transpose(1, 2).contiguous() for x in whole]
    groups = buffers[0].shape[1] // buffers[1].shape[1]
    buffers[1:] = [x.repeat_interleave(groups, 1) for x in buffers[1:]]

    def call(method: str) -> torch.Tensor:
        set_rotate_method(method)
        # ``context_parallel`` replaces this attribute.
        return torch.nn.functional.scaled_dot_product_attention(*buffers, is_causal=True)

    stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]))
    names = ("allgather", "alltoall")
    return {f"context_parallel {each}": lambda m=each: call(m) for each in names}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default="pre,post,gemm_pre,post_gemm,attn")
    parser.add_argument("--tokens", default="8000,16384", help="tokens over all ranks")
    parser.add_argument("--lengths-random", type=int, default=0, metavar="N",
                        help="measure the tuned ops at N random numbers of tokens")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    parser.add_argument("--heads", default="32/32,32/8", help="q heads / KV heads")
    parser.add_argument("--hidden", default="4096,8192", help="columns of x, for projections")
    parser.add_argument("--dim", type=int, default=128, help="elements of a head")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--best", type=int, default=0, help="configs of an algorithm; 0: all")
    parser.add_argument("--rounds", type=int, default=25 if is_cuda() else 1)
    parser.add_argument(
        "--link", type=float, default=375.0, help="GB/s of a GPU's links in one direction"
    )
    parser.add_argument("--limit", type=int, default=300, help="seconds per row")
    parser.add_argument("--scale", type=int, default=1 if is_cuda() else 256, help="divide tokens")
    parser.add_argument("--verbose", action="store_true", help="list every config")
    return parser.parse_args(arguments)


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def rows_of(options: argparse.Namespace) -> list[tuple[int, str, int]]:
    """Return the tokens, heads and hidden sizes of the rows to measure."""
    heads, hidden = options.heads.split(","), [int(text) for text in options.hidden.split(",")]
    if options.lengths_random:
        drawn = random_sizes(4 * options.lengths_random, 32768, options.seed)
        lengths = [n for n in drawn if n >= 64][: options.lengths_random]
        others = itertools.cycle(itertools.product(heads, hidden))
        return [(n, *other) for n, other in zip(lengths, others, strict=False)]
    tokens = [int(text) for text in options.tokens.split(",")]
    if not {"gemm_pre", "post_gemm"} & set(options.ops.split(",")):
        hidden = hidden[:1]
    return list(itertools.product(tokens, heads, hidden))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    size, start, ratios = dist.get_world_size(), time.perf_counter(), []
    gpu = torch.cuda.get_device_name() if is_cuda() else "CPU ranks"
    log(f"{gpu}, torch {torch.__version__}")
    for tokens, text, hidden in rows_of(options):
        spent = [time.perf_counter() - start]
        dist.broadcast_object_list(spent, 0)
        if spent[0] > 60 * options.minutes:
            log("no time for other rows")
            break
        # A rank that hangs prints its stacks and ends.
        faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
        q_heads, kv_heads = map(int, text.split("/"))
        number = max(1, tokens // options.scale // size) * size
        log(f"{number} tokens, {text} heads of {options.dim}, hidden {hidden}, {size} ranks")
        if set(options.ops.split(",")) - {"attn"}:
            ratios += ulysses(number, (q_heads, kv_heads), hidden, options)
        if "attn" in options.ops.split(","):
            ratios += attention(number, (q_heads, kv_heads), options)
        faulthandler.cancel_dump_traceback_later()
    if ratios:
        below = sum(ratio < 0.98 for ratio in ratios)
        log(
            f"{len(ratios)} results: worst {min(ratios):.3f} x the library, geometric mean "
            f"{statistics.geometric_mean(ratios):.3f}, {below} below 0.98"
        )
    finalize_distributed()


if __name__ == "__main__":
    main()
