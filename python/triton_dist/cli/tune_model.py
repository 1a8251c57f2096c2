"""``tune-model``: tune a model before serving, on the ranks that will serve it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from triton_dist.cli.subcommand import add_subcommand

_MODES = {"ag_rs": "triton_dist", "allreduce": "triton_dist_AR", "gemm_ar": "triton_dist_gemm_ar"}


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "tune-model",
        _run,
        help="tune a model before serving, on all ranks",
        description="Runs a Llama-like model, sharded over the ranks, once for each given shape of "
        "prefill and decode. Shapes that are not in the cache are tuned. A server that starts "
        "later with TRITON_DIST_AUTOTUNE_FROZEN=1 then uses the results without measuring. Start "
        "this subcommand on all ranks, with bash scripts/launch.sh -m triton_dist or torchrun.",
        examples=["tune-model --model FOLDER --bsz 1,16 --seq_len 128,2048"],
    )
    parser.add_argument(
        "--model", required=True, help="name of a known model, or a folder with config.json"
    )
    parser.add_argument(
        "--bsz", type=_numbers, default=[1], help="batch sizes of decode, such as 1,16; prefill "
        "uses the largest; default: 1",
    )  # fmt: skip
    parser.add_argument(
        "--seq_len", type=_numbers, default=[128], help="prompt lengths; default: 128"
    )
    for phase, default in (("prefill", "ag_rs"), ("decode", "gemm_ar")):
        parser.add_argument(
            f"--{phase}_mode", choices=list(_MODES), default=default,
            help=f"how {phase} uses the ranks: tokens sharded over ranks (ag_rs), or replicated "
            f"with sums by all-reduce (allreduce) or fused GEMM + all-reduce (gemm_ar); default: "
            f"{default}",
        )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16",
        help="dtype of the model; default: bfloat16",
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    return sorted({int(each) for each in text.split(",")})


def _run(arguments: argparse.Namespace) -> int:
    import torch

    from triton_dist.models import LLM, ModelConfig
    from triton_dist.runtime.ranks import group_for
    from triton_dist.utils import dist_print, finalize_distributed, initialize_distributed

    begin, group = time.perf_counter(), initialize_distributed()
    ranks, batch = group_for(group), max(arguments.bsz)
    config = ModelConfig(
        arguments.model, max(arguments.seq_len), getattr(torch, arguments.dtype), True,
        ranks.rank, ranks.size,
    )  # fmt: skip
    model = LLM(config, group)
    model.init_triton_dist_ctx(batch * config.max_length)
    model.tune(batch, arguments.seq_len, [], _MODES[arguments.prefill_mode])
    model.tune(batch, [], arguments.bsz, _MODES[arguments.decode_mode])
    model.finalize()
    shapes = len(arguments.seq_len) + len(arguments.bsz)
    took = time.perf_counter() - begin
    dist_print(f"{arguments.model}: {shapes} shapes tuned on {ranks.size} ranks in {took:.1f} s")
    finalize_distributed()
    return 0
