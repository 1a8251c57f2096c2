"""Compare the sequence-parallel ops with NCCL, in CUDA graphs.

    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --quick
    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --ops pre --tokens 8000,16384 \
        --heads 32/32,32/8 --verbose
    bash scripts/launch.sh benchmarks/bench_sequence_parallel.py --tokens-random 40 --best 4

The baseline of the Ulysses ops ("pre", "post") is a permutation, NCCL's all-to-all, and another
permutation. Their limit is the time to send a rank's bytes at --link GB/s. AllGather-attention
("attn") has two baselines: NCCL's all-gather before the attention, and torch's
``context_parallel``, which is not captured in a graph. Its limit is the larger of two times: the
fastest library's whole attention divided by the ranks, and NCCL's all-gather. Every result is
compared with the baseline. Calls are interleaved, with a cold L2 cache; a sample is the slowest
rank's time.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from overlap.any_m import random_sizes

from triton_dist.kernels.common import libraries
from triton_dist.kernels.nvidia import (
    create_sp_ag_attention_context,
    create_ulysses_context,
    sp_ag_attention,
    ulysses_post_attn,
    ulysses_pre_attn,
)
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import attention as library_attention
from triton_dist.kernels.nvidia.sp_ag_attention.algorithms import backends
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import captured, interleaved
from triton_dist.utils import finalize_distributed, initialize_distributed, is_cuda

LIBRARY = "library"


def shown(config: Mapping[str, Any]) -> str:
    return " ".join(str(value) for value in config.values())


def configs(op: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the configs of our algorithms to measure."""
    space = [each for each in op.config_space if each["algorithm"] != "collective"]
    if options.quick:
        space = [each for each in space if each["num_chunks"] >= 4]
        space = [each for each in space if each["num_ctas"] * each["block_bytes"] >= 1 << 20]
    return space[: options.best] if options.best else space


def measure(
    op: Any, call: Callable[..., Any], limit_us: float, options: argparse.Namespace, name: str
) -> tuple[float, float]:
    """Check and time the configs of ``op``; return the best time and the library's, in us."""
    want = call(algorithm="collective")
    calls: dict[str, Callable[[], Any]] = {LIBRARY: lambda: call(algorithm="collective")}
    for config in configs(op, options):
        found = call(**config)
        wrong = [i for i, (a, b) in enumerate(zip(found, want, strict=True)) if not a.equal(b)]
        verdict: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(verdict, wrong)
        if any(verdict):
            log(f"  WRONG {name} {shown(config)}: tensors {verdict}")
            continue
        calls[shown(config)] = lambda c=config: call(**c)
    graphs = {each: captured(calls[each]) for each in calls}
    samples = interleaved(graphs, options.rounds)
    times = {each: sample.median * 1e3 for each, sample in samples.items()}
    ours = {each: times[each] for each in times if each != LIBRARY} or times
    best = min(ours, key=ours.__getitem__)
    log(
        f"  {name:5} {times[best]:8.1f} us ({best}); limit {limit_us:.1f}, "
        f"{times[best] / limit_us:.2f} x; library {times[LIBRARY]:.1f} "
        f"({times[LIBRARY] / times[best]:.2f} x)"
    )
    if options.verbose:
        for each, microseconds in sorted(times.items(), key=lambda item: item[1]):
            log(f"      {microseconds:8.1f} {each}")
    return times[best], times[LIBRARY]


def ulysses(tokens: int, heads: tuple[int, int], options: argparse.Namespace) -> list[float]:
    """Measure the Ulysses ops; return the speed of each relative to the library."""
    rank, size, dtype = dist.get_rank(), dist.get_world_size(), torch.bfloat16
    device, dim = current_device().torch_device, options.dim
    ratios = []
    local = tokens // size
    q, k, v = (
        torch.randn(1, local, n, dim, device=device, dtype=dtype)
        for n in (heads[0], *heads[1:] * 2)
    )
    o = torch.randn(1, local * size, heads[0] // size, dim, device=device, dtype=dtype)
    with create_ulysses_context(rank, size, size, local * size, *heads, dim, dtype) as ctx:
        share = local * dim * 2 * (size - 1) / size / options.link / 1e3
        for name, op, call, width in (
            ("pre", ulysses_pre_attn, lambda **c: ulysses_pre_attn.fn(q, k, v, ctx, **c),
             heads[0] + 2 * max(heads[1], size)),
            ("post", ulysses_post_attn, lambda **c: ulysses_post_attn.fn(o, ctx, **c), heads[0]),
        ):  # fmt: skip
            if name in options.ops.split(","):
                ours, library = measure(op, call, share * width, options, name)
                ratios.append(library / ours)
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
            compare_attention(q, k, v, ctx, backend)
            for name in ("copy_engine", "collective"):
                config = {"algorithm": name, "backend": backend}
                calls[f"{name} {backend}"] = captured(
                    lambda c=config: sp_ag_attention.fn(q, k, v, ctx, **c)
                )
            calls[f"alone {backend}"] = captured(
                lambda b=backend: library_attention(b, *whole, True, None)
            )
        packed = torch.cat([k, v], 2)
        calls["all-gather alone"] = captured(lambda: libraries.all_gather_rows(packed, None))
        if is_cuda():
            others = context_parallel_calls(whole, stack)
            for name, call in others.items():
                try:
                    call()
                    calls[name] = call
                except Exception as failure:  # on all ranks: torch does not support the call
                    log(f"  {name}: {type(failure).__name__}: {str(failure)[:200]}")
        samples = interleaved(calls, options.rounds)
        ctx.check()
    times = {each: sample.median * 1e3 for each, sample in samples.items()}
    best = {
        kind: min(time for each, time in times.items() if each.startswith(kind))
        for kind in ("copy_engine", "collective", "alone")
    }
    ours, limit = best["copy_engine"], max(best["alone"] / size, times["all-gather alone"])
    log(f"  attn  {ours:8.1f} us; limit {limit:.1f}, {ours / limit:.2f} x")
    for each, microseconds in times.items():
        log(f"      {microseconds:8.1f} {each} ({microseconds / ours:.2f} x ours)")
    return [time / ours for each, time in times.items() if each.startswith(("coll", "context"))]


def compare_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: Any, backend: str
) -> None:
    """Report differences between the results of both algorithms, which call the same library."""
    found, want = (
        sp_ag_attention.fn(q, k, v, ctx, algorithm=name, backend=backend)
        for name in ("copy_engine", "collective")
    )
    for name, a, b in zip(("out", "lse"), found, want, strict=True):
        error = (a.float() - b.float()).abs().max()
        if not error <= 0.01:
            wrong = ((a.float() - b.float()).abs() > 0.01).nonzero()
            print(
                f"  WRONG {backend} {name}, rank {dist.get_rank()}: {float(error):.3g}, NaN "
                f"{int(a.isnan().sum())} and {int(b.isnan().sum())} of {a.numel()}, {len(wrong)} "
                f"wrong, first {wrong[:1].tolist()}, last {wrong[-1:].tolist()}",
                flush=True,
            )


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
    parser.add_argument("--ops", default="pre,post,attn", help="some of: %(default)s")
    parser.add_argument("--tokens", default="8000,16384", help="tokens over all ranks")
    parser.add_argument("--tokens-random", type=int, metavar="N", help="measure N random numbers")
    parser.add_argument("--heads", default="32/32,32/8", help="q heads / KV heads")
    parser.add_argument("--dim", type=int, default=128, help="elements of a head")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no row after this time")
    parser.add_argument("--quick", action="store_true", help="few configs")
    parser.add_argument("--best", type=int, default=0, help="number of configs; 0: all")
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


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    initialize_distributed()
    size, start, ratios = dist.get_world_size(), time.perf_counter(), []
    gpu = torch.cuda.get_device_name() if is_cuda() else "CPU ranks"
    log(f"{gpu}, torch {torch.__version__}")
    numbers = [int(text) for text in options.tokens.split(",")]
    if options.tokens_random:
        numbers = [max(64, n) for n in random_sizes(options.tokens_random, 32768, 0)]
    for tokens in numbers:
        for text in options.heads.split(","):
            spent = [time.perf_counter() - start]
            dist.broadcast_object_list(spent, 0)
            if spent[0] > 60 * options.minutes:
                continue
            # A rank that hangs prints its stacks and ends.
            faulthandler.dump_traceback_later(options.limit, exit=True, file=sys.__stderr__)
            q_heads, kv_heads = map(int, text.split("/"))
            number = max(1, tokens // options.scale // size) * size
            log(f"{number} tokens, {text} heads of {options.dim}, {size} ranks")
            if {"pre", "post"} & set(options.ops.split(",")):
                ratios += ulysses(number, (q_heads, kv_heads), options)
            if "attn" in options.ops.split(","):
                ratios += attention(number, (q_heads, kv_heads), options)
            faulthandler.cancel_dump_traceback_later()
    if ratios:
        log(f"worst {min(ratios):.2f} x the library, {sum(r < 0.98 for r in ratios)} below 0.98")
    finalize_distributed()


if __name__ == "__main__":
    main()
