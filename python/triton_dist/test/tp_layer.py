"""Common parts of the scripts for the tensor-parallel layers.

A script builds a layer from a block of a model, and compares the layer's results with the block's.
It then prints the layer's times, next to times with torch's GEMMs and all-reduce.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.allreduce import get_allreduce_methods
from triton_dist.models.llama import Block, LlamaConfig
from triton_dist.models.utils import scaled_down
from triton_dist.runtime.device import current_device
from triton_dist.test.utils import (
    TIMES_NOT_MEANINGFUL,
    ScriptParser,
    check_rank_by_rank,
    dtype_named,
    profile,
    report_passed,
)
from triton_dist.testing.timing import capture_graph, time_interleaved
from triton_dist.utils import dist_print, finalize_distributed, is_cuda

CPU_SCALE = 64
"""Divisor of the sizes for the interpreter."""
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer and its expected result."""

    call: Callable[[], torch.Tensor]
    expected: torch.Tensor


def make_parser(description: str | None, model: str, bsz: int = 0) -> ScriptParser:
    """Return a parser with the options of all layer scripts. With ``bsz``, which is the default of
    ``--bsz``, add the options that ``batch_and_tokens`` reads."""
    parser = ScriptParser(description)
    parser.add_argument(
        "--model", default=model, help="name of a known model, or a folder with a config.json"
    )
    parser.add_dtype("bfloat16")
    parser.add_rounds(iters=100, warmup=20)
    parser.add_common_options("seed", "profile")
    parser.add_argument(
        "--allreduce_method", default="", choices=["", *get_allreduce_methods()],
        help="ignored: the algorithm is tuned",
    )  # fmt: skip
    if bsz:
        parser.add_argument("--bsz", type=int, default=bsz, help="sequences over all ranks")
        parser.add_argument("--seq_len", type=int, default=128, help="tokens of a sequence")
    return parser


def add_mode_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that prefill and decode."""
    parser.add_argument(
        "--run_type", default="prefill", choices=["prefill", "decode"],
        help="process the whole prompt, or one token after the prompt",
    )  # fmt: skip
    parser.add_argument(
        "--mode", default="ag_rs", choices=["ag_rs", "allreduce", "gemm_ar"],
        help="ag_rs: sequence-parallel mode; allreduce and gemm_ar: all-reduce mode",
    )  # fmt: skip


def add_ignored_options(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Accept and ignore options that select a kernel, because the kernel is tuned."""
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="ignored: calls are tuned")


def random_block(args: argparse.Namespace) -> tuple[Block, LlamaConfig]:
    """Return a block of the model with random weights, and the model's config. Weights are equal on
    all ranks. Sizes are reduced on CPU ranks."""
    config = LlamaConfig.of(args.model)
    if not is_cuda():
        config = scaled_down(config, CPU_SCALE)
    torch.manual_seed(0)
    with torch.device(current_device().torch_device):
        block = Block(config, 0).to(dtype_named(args.dtype))
    return block.requires_grad_(False), config


def reduced_model(model: str, num_layers: int | None, folder: str) -> str:
    """Return ``model`` if it is not reduced. On CPU ranks, or with ``num_layers``, write a smaller
    model to ``folder`` and return ``folder``."""
    if num_layers is None and is_cuda():
        return model
    config = LlamaConfig.of(model)
    if not is_cuda():
        config = scaled_down(config, CPU_SCALE)
    layers = num_layers or (config.num_hidden_layers if is_cuda() else 2)
    dataclasses.replace(config, num_hidden_layers=layers).save(folder)
    return folder


def random_input(args: argparse.Namespace, *shape: int) -> torch.Tensor:
    """Return random values from 0 to 0.1, equal on all ranks."""
    values = torch.rand(shape, generator=torch.Generator().manual_seed(args.seed)) / 10
    return values.to(dtype_named(args.dtype)).to(current_device().torch_device)


def rows_of_rank(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def batch_and_tokens(args: argparse.Namespace, max_batch: int, max_tokens: int) -> tuple[int, int]:
    """Return (sequences, tokens per sequence); the first is a multiple of the number of ranks.
    ``max_batch`` and ``max_tokens`` are limits on CPU ranks."""
    size, batch, tokens = dist.get_world_size(), args.bsz, args.seq_len
    if not is_cuda():
        batch, tokens = min(batch, max_batch), min(tokens, max_tokens)
    return max(1, batch // size) * size, tokens


def run(args: argparse.Namespace, title: str, calls: Mapping[str, LayerCall], layer: Any) -> None:
    """Check each call and, for the case ``perf``, time it. Finalize ``layer`` at the end."""
    limit = _TOLERANCES[dtype_named(args.dtype)]
    for each in calls.values():
        check_rank_by_rank(each.call(), each.expected, limit)
    report_passed(f"{args.dtype}, {title}")
    if args.case == "perf":
        _print_times(args, title, {name: each.call for name, each in calls.items()})
    layer.finalize()
    finalize_distributed()


def _print_times(
    args: argparse.Namespace, title: str, calls: Mapping[str, Callable[[], torch.Tensor]]
) -> None:
    graphs = {name: capture_graph(call) for name, call in calls.items()}
    rounds, warmup = (max(2, args.iters), args.warmup) if is_cuda() else (2, 0)
    samples = time_interleaved(graphs, rounds=rounds, warmup_rounds=warmup)
    graphs.clear()  # free the graphs before the contexts whose memory they use
    base = next(iter(samples.values())).median
    if is_cuda():
        dist_print(f"{title}, slowest rank, cold cache, median of {rounds} interleaved rounds:")
    else:
        dist_print(f"{title}\n{TIMES_NOT_MEANINGFUL}")
    for name, sample in samples.items():
        ratio = f"{base / sample.median:10.2f} x {next(iter(samples))}" if is_cuda() else ""
        dist_print(f"{name:32}{sample.median:10.3f} ms{ratio}")
    profile("tp_layer", args.profile, *calls.values())
