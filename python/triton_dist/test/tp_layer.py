"""Parts that the scripts of the tensor-parallel layers share: options, the block that a layer is
made of, a check against that block, and times beside torch's product and all-reduce."""

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
    NO_TIMES,
    ScriptParser,
    check_by_turns,
    dtype_named,
    profile,
    report_passed,
)
from triton_dist.testing.timing import captured, interleaved
from triton_dist.utils import dist_print, finalize_distributed, is_cuda

CPU_SCALE = 64
"""By which sizes are divided for the interpreter."""
_TOLERANCES = {torch.float16: 1e-2, torch.bfloat16: 2e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class Form:
    """A call form of a layer, and what it must give."""

    call: Callable[[], torch.Tensor]
    expected: torch.Tensor


def make_parser(description: str | None, model: str) -> ScriptParser:
    """Options of all these scripts."""
    parser = ScriptParser(description, ("check", "perf"), default="perf")
    parser.add_other_name("--check", "check")
    parser.add_argument(
        "--model", default=model, help="a known name, or a folder with a config.json"
    )
    parser.add_dtype("bfloat16")
    parser.add_rounds(iters=100, warmup=20)
    parser.add_argument("--seed", type=int, default=42, help="of the data")
    parser.add_argument("--profile", action="store_true", help="write a trace of 20 calls to prof/")
    return parser


def add_mode(parser: argparse.ArgumentParser) -> None:
    """Options of the scripts that prefill and decode."""
    parser.add_argument(
        "--run_type", default="prefill", choices=["prefill", "decode"],
        help="the whole prompt, or one token behind it",
    )  # fmt: skip
    parser.add_argument(
        "--mode", default="ag_rs", choices=["ag_rs", "allreduce", "gemm_ar"],
        help="sequence-parallel, or with an all-reduce (both others)",
    )  # fmt: skip
    parser.add_argument(
        "--allreduce_method", default="", choices=["", *get_allreduce_methods()],
        help="no effect: it is tuned",
    )  # fmt: skip


def add_ignored(parser: argparse.ArgumentParser, *flags: str) -> None:
    """Accept flags of scripts that choose a kernel: here calls are tuned."""
    for flag in flags:
        parser.add_argument(flag, action="store_true", help="no effect: calls are tuned")


def block_of(args: argparse.Namespace) -> tuple[Block, LlamaConfig]:
    """A block of the model with random weights, the same on all ranks, where kernels run; small on
    CPU ranks."""
    config = LlamaConfig.of(args.model)
    if not is_cuda():
        config = scaled_down(config, CPU_SCALE)
    torch.manual_seed(0)
    with torch.device(current_device().torch_device):
        block = Block(config, 0).to(dtype_named(args.dtype))
    return block.requires_grad_(False), config


def smaller(model: str, num_layers: int | None, folder: str) -> str:
    """The model, or where it is to have other sizes, ``folder``, to which they are written: of CPU
    ranks, or ``num_layers``."""
    if num_layers is None and is_cuda():
        return model
    config = LlamaConfig.of(model)
    if not is_cuda():
        config = scaled_down(config, CPU_SCALE)
    layers = num_layers or (config.num_hidden_layers if is_cuda() else 2)
    dataclasses.replace(config, num_hidden_layers=layers).save(folder)
    return folder


def operand(args: argparse.Namespace, *shape: int) -> torch.Tensor:
    """Values of 0 to 0.1, the same on all ranks."""
    made = torch.rand(shape, generator=torch.Generator().manual_seed(args.seed)) / 10
    return made.to(dtype_named(args.dtype)).to(current_device().torch_device)


def rows_of_rank(whole: torch.Tensor) -> torch.Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def batch_and_tokens(
    args: argparse.Namespace, most_batch: int, most_tokens: int
) -> tuple[int, int]:
    """Return the sequences, a multiple of the ranks, and their tokens: fewer on CPU ranks."""
    size, batch, tokens = dist.get_world_size(), args.bsz, args.seq_len
    if not is_cuda():
        batch, tokens = min(batch, most_batch), min(tokens, most_tokens)
    return max(1, batch // size) * size, tokens


def run(args: argparse.Namespace, title: str, forms: Mapping[str, Form], layer: Any) -> None:
    """Compare each form with what it must give; then, unless it was for that alone, time all.
    Finalize ``layer`` in the end."""
    _run(args, title, forms)
    layer.finalize()
    finalize_distributed()


def _run(args: argparse.Namespace, title: str, forms: Mapping[str, Form]) -> None:
    limit = _TOLERANCES[dtype_named(args.dtype)]
    for form in forms.values():
        check_by_turns(form.call(), form.expected, limit)
    report_passed(f"{args.dtype}, {title}")
    if args.case != "perf":
        return
    calls = {name: captured(form.call) for name, form in forms.items()}
    rounds, warmup = (max(2, args.iters), args.warmup) if is_cuda() else (2, 0)
    samples = interleaved(calls, rounds=rounds, warmup_rounds=warmup)
    calls.clear()  # graphs end before the contexts of what they hold
    base = next(iter(samples.values())).median
    if is_cuda():
        dist_print(f"{title}, slowest rank, cold cache, median of {rounds} interleaved rounds:")
    else:
        dist_print(f"{title}\n{NO_TIMES}")
    for name, sample in samples.items():
        ratio = f"{base / sample.median:10.2f} x {next(iter(samples))}" if is_cuda() else ""
        dist_print(f"{name:32}{sample.median:10.3f} ms{ratio}")
    profile("tp_layer", args.profile, *(form.call for form in forms.values()))


def no_grad(module: Any) -> Callable[..., Any]:
    """``module`` without gradients."""
    return torch.no_grad()(module)  # type: ignore[no-any-return]
