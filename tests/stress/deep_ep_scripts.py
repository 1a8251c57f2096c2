"""Run DeepEP's own tests of V1, from a folder that has them, on GPUs or on CPU ranks.

    TRITON_INTERPRET=1 TRITON_DIST_DEVICE=cpu TRITON_DIST_AUTOTUNE=0 \\
        python -m tests.stress.deep_ep_scripts FOLDER intranode --num-tokens 12 --hidden 256

The sources are not changed. ``bench_kineto``, which looks for DeepEP's kernels, is replaced.
Without a GPU, ``cuda`` in arguments of torch, events, NCCL and ``bench`` are also replaced.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import triton_dist.deep_ep


class OnCPU(TorchFunctionMode):
    """Replace ``device="cuda"`` in calls of torch."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*args, **options)


class Clock:
    """An event of ``torch.cuda``."""

    def __init__(self, **_: Any) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Clock) -> float:
        return 1e3 * (end.time - self.time)


def replace_cuda() -> None:
    torch.cuda.Event = Clock
    torch.cuda.synchronize = torch.cuda.set_device = lambda *_: None
    # Tensors must name their device: the default has no memory.
    set_default_device = torch.set_default_device
    torch.set_default_device = lambda *_: set_default_device("meta")
    initialise = dist.init_process_group
    # Keep the signature without ``device_id``, which names a GPU.
    dist.init_process_group = lambda backend, init_method, world_size, rank: initialise(
        "gloo", init_method=init_method, world_size=world_size, rank=rank
    )
    gather = dist.all_gather_into_tensor
    # gloo, unlike NCCL, compares the shapes.
    dist.all_gather_into_tensor = lambda out, shard, group=None: gather(
        out.view(-1, *shard.shape[1:]), shard, group=group
    )


def bench(function: Any, num_warmups: int = 0, num_tests: int = 1, post_fn: Any = None) -> Any:
    function()
    return 1.0, 1.0, 1.0


def bench_kineto(function: Any, kernel_names: Any, **options: Any) -> Any:
    function()
    per_kernel = [1.0] * options.get("num_kernels_per_period", 1)
    return [per_kernel if len(per_kernel) > 1 else 1.0 for _ in kernel_names]


def run(local_rank: int, folder: str, name: str, args: argparse.Namespace) -> None:
    sys.path.insert(0, folder)
    sys.modules["deep_ep"] = triton_dist.deep_ep
    utils = importlib.import_module("utils")
    utils.bench_kineto = bench_kineto
    on_device: Any = contextlib.nullcontext()
    if not torch.cuda.is_available():
        replace_cuda()
        utils.bench, on_device = bench, OnCPU()
    with on_device:
        importlib.import_module(f"test_{name}").test_loop(local_rank, args.num_processes, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("name", choices=["intranode", "low_latency"])
    for option, default in (
        ("processes", 2), ("tokens", 12), ("hidden", 512), ("topk", 3), ("experts", 8),
    ):  # fmt: skip
        name = "--hidden" if option == "hidden" else f"--num-{option}"
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--use-logfmt", action="store_true")
    args = parser.parse_args()
    args.allow_mnnvl = args.use_fabric = args.disable_nvlink = False
    args.pressure_test = args.shrink_test = False
    torch.multiprocessing.spawn(run, (args.folder, args.name, args), args.num_processes)
    print(f"test_{args.name}.py passed on {args.num_processes} ranks")


if __name__ == "__main__":
    main()
