"""Compare the expert-parallel layer with NCCL's all-to-all and torch's grouped GEMM.

    bash scripts/launch.sh benchmarks/bench_ep_moe.py
    bash scripts/launch.sh benchmarks/bench_ep_moe.py --models qwen3-30b --json moe.json

The baseline sends a row for each expert of each token, and the numbers of these rows, with
``all_to_all_single``. It multiplies with ``_grouped_mm``, and sends the results back. The host must
wait for the numbers, so a CUDA graph cannot capture the baseline. Selecting experts is not timed.
``forward`` of our layer is also measured in a CUDA graph. ``both`` is forward and backward, with
the gradients of x, of routing weights and of experts. Results and gradients are first compared.
Times are medians of the slowest rank, interleaved, with a cold cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_to_all_single_autograd

from triton_dist.kernels.common.moe.rows import grouped_mm
from triton_dist.layers.nvidia import TensorParallel
from triton_dist.layers.nvidia.expert_parallel import ep_experts
from triton_dist.runtime.device import current_device
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed


class Sizes(NamedTuple):
    hidden: int
    columns: int
    experts: int
    topk: int


MODELS = {
    "mixtral": Sizes(4096, 14336, 8, 2),
    "qwen3-30b": Sizes(2048, 768, 128, 8),
    "deepseek-v3": Sizes(7168, 2048, 256, 8),
    "tiny": Sizes(64, 32, 8, 2),
}


def library(
    x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, group: Any,
) -> torch.Tensor:  # fmt: skip
    """Return each token's weighted sum over its experts, by torch and NCCL."""
    ranks, local = dist.get_world_size(), len(gate_up)
    flat, topk = ids.flatten(), ids.shape[1]
    order = flat.argsort(stable=True)
    sent = torch.bincount(flat, minlength=local * ranks)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    send = sent.view(ranks, local).sum(1).tolist()
    receive = received.view(ranks, local).sum(1).tolist()
    rows = all_to_all_single_autograd(x[order // topk], receive, send, group)
    # From the order of (source, expert) to the order of (expert, source).
    experts = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(received)
    by_expert = experts.argsort(stable=True)
    ends = received.view(ranks, local).sum(0).cumsum(0).int()
    gate, up = grouped_mm(rows[by_expert], gate_up, ends).chunk(2, -1)
    products = grouped_mm(torch.nn.functional.silu(gate) * up, down, ends)
    returned = torch.zeros_like(products).index_copy(0, by_expert, products)
    returned = all_to_all_single_autograd(returned, send, receive, group)
    weighted = returned * scales.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, order // topk, weighted)


def operands(sizes: Sizes, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return x, ids, scales and this rank's experts, with gradients."""
    device, local = current_device().torch_device, sizes.experts // dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    chances = torch.rand(tokens, sizes.experts, device=device)
    scales, ids = chances.topk(sizes.topk)
    gate_up = torch.randn(local, 2 * sizes.columns, sizes.hidden, device=device, dtype=dtype)
    down = torch.randn(local, sizes.hidden, sizes.columns, device=device, dtype=dtype)
    x = torch.randn(tokens, sizes.hidden, device=device, dtype=dtype)
    floats = (
        x, scales.softmax(-1), (gate_up / sizes.hidden**0.5).mT, (down / sizes.columns**0.5).mT,
    )  # fmt: skip
    x, scales, gate_up, down = (each.requires_grad_() for each in floats)
    return [x, ids.int(), scales, gate_up, down]


def measure(
    sizes: Sizes, tokens: int, dtype: torch.dtype, rounds: int, graphs: bool, keeps: bool
) -> dict[str, float]:
    """Return median milliseconds by name."""
    group = dist.group.WORLD
    inputs = operands(sizes, tokens, dtype)
    leaves = [each for each in inputs if each.requires_grad]
    with TensorParallel(tokens * dist.get_world_size()) as collectives:

        def ours(keep: bool = False) -> torch.Tensor:
            return ep_experts(*inputs, collectives, tokens, keep_gathered=keep)

        def both(forward: Callable[[], torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
            def run() -> list[torch.Tensor]:
                y = forward()
                return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y) / 16)]

            return run

        def inference(forward: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            return torch.no_grad()(forward)

        def reference() -> torch.Tensor:
            return library(*inputs, group)

        for found, wanted in zip(both(ours)(), both(reference)(), strict=True):
            error = (found.float() - wanted.float()).norm() / wanted.float().norm()
            assert error < 3e-2, (found.shape, float(error))
        calls: dict[str, Callable[[], Any]] = {
            "forward": inference(ours), "forward, library": inference(reference),
            "both": both(ours), "both, library": both(reference),
        }  # fmt: skip
        if keeps:
            calls["both, kept"] = both(lambda: ours(True))
        if graphs:
            calls["forward, graph"] = capture_graph(inference(ours))
        samples = time_interleaved(calls, rounds=rounds)
        times = {name: each.median for name, each in samples.items()}
        calls.clear()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="mixtral,qwen3-30b,deepseek-v3", help=f"some of: {', '.join(MODELS)}"
    )
    parser.add_argument("--tokens", default="4096", help="numbers of tokens of each rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-kept", action="store_true", help="do not time keep_gathered=True")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    initialize_distributed()
    on_gpu = not current_device().interprets
    dtype = torch.bfloat16 if on_gpu else torch.float32
    results = {}
    for name in args.models.split(","):
        for tokens in map(int, args.tokens.split(",")):
            times = measure(MODELS[name], tokens, dtype, args.rounds, on_gpu, not args.no_kept)
            results[f"{name} {tokens}"] = times
            for what, base in (
                ("forward", "forward"), ("forward, graph", "forward"), ("both", "both"),
                ("both, kept", "both"),
            ):  # fmt: skip
                if what in times:
                    ratio = times[f"{base}, library"] / times[what]
                    dist_print(
                        f"{name:12} {tokens:6} {what:15} {times[what]:8.3f} ms, library "
                        f"{times[f'{base}, library']:8.3f} ms, {ratio:.2f}x"
                    )
    if args.json and dist.get_rank() == 0:
        args.json.write_text(json.dumps(results, indent=1))
    finalize_distributed()


if __name__ == "__main__":
    main()
