"""What ranks do in the tests of timelines."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triton_dist import tune
from triton_dist.profiler_utils import group_profile
from triton_dist.runtime.device import current_device
from triton_dist.testing.opinfo import OPINFOS
from triton_dist.testing.opinfo.gemm import Shape
from triton_dist.timelines import trace

SHAPE = Shape(32, 32, 32)
DTYPE = torch.float16
ALGORITHMS = ("full_mesh_push", "fused_push")
OVERWRITE = {"autotune": False, "autotune_allow_arg_overwrite": True}


def profile_calls(folder: Path, tool: str = "torch") -> dict[str, Any]:
    """A timeline of ``ag_gemm`` and ``gemm_ar``, an op that refuses, and a user's function; gives
    what they cost by their cases and, of this rank's clock, from when to when each was called."""
    rank, size = dist.get_rank(), dist.get_world_size()
    costs, spans = {}, {}
    with group_profile("nothing", False, folder=folder):
        torch.ones(8) @ torch.ones(8)
    cases = {name: OPINFOS[name] for name in ("ag_gemm", "gemm_ar")}
    contexts = {name: info.context(SHAPE, DTYPE) for name, info in cases.items()}
    calls = {}
    for name, info in cases.items():
        operands = info.operands(SHAPE, DTYPE, size)
        calls[name] = info.arguments(operands, contexts[name])
        info.op(*calls[name][0], **calls[name][1], autotune=False)
    with group_profile("region", folder=folder, tool=tool):
        for name, info in cases.items():
            args, kwargs = calls[name]
            dist.barrier()
            begin = time.time_ns()
            info.op(*args, **kwargs, autotune=False)
            current_device().synchronize()
            spans[name] = (begin, time.time_ns())
            costs[name] = info.cost(SHAPE, DTYPE, size)
        with suppress(Exception):  # refused: of no known shape
            cases["ag_gemm"].op(calls["ag_gemm"][0][0], None, contexts["ag_gemm"], autotune=False)
        doubled(torch.ones(8), autotune=False)
    if tool == "torch":
        args, kwargs = calls["ag_gemm"]
        with group_profile("marked", folder=folder, marks=True):
            for algorithm in ALGORITHMS:
                cases["ag_gemm"].op(*args, **kwargs, algorithm=algorithm, **OVERWRITE)
        cases["ag_gemm"].op(*args, **kwargs, autotune=False)  # as it was before
    dist.barrier()
    for context in contexts.values():
        context.finalize()
    return {"rank": rank, "costs": costs, "spans": spans}


def marks_and_a_graph(folder: Path) -> dict[str, Any]:
    """How often "mma" is marked in a call, and in one that is then captured and replayed; whether
    all had the result of a call without marks. On GPUs."""
    info, size, device = OPINFOS["ag_gemm"], dist.get_world_size(), current_device()
    latest = torch.empty(0)
    results: list[torch.Tensor] = []
    with info.context(SHAPE, DTYPE) as context:
        args, kwargs = info.arguments(info.operands(SHAPE, DTYPE, size), context)

        def call() -> None:
            nonlocal latest
            latest = info.op(*args, **kwargs, autotune=False)

        def keep() -> None:
            device.synchronize()
            results.append(latest.clone())

        call()
        keep()
        with group_profile("once", folder=folder, marks=True):
            call()
            keep()
        with group_profile("replayed", folder=folder, marks=True):
            replay = device.capture(call, 60.0)  # which calls once before
            for _ in range(2):
                replay()
                keep()
        call()
        keep()
        dist.barrier()
    told: dict[str, Any] = {"same": [torch.equal(results[0], each) for each in results[1:]]}
    for name in ("once", "replayed"):
        file = folder / name / f"rank-{dist.get_rank()}.json.gz"
        told[name] = [e.get("cat") for e in trace.read(file)["traceEvents"] if e["name"] == "mma"]
    return told


@tune.autotune(config_space=[{"times": 2}], key_fn=lambda x: len(x))
def doubled(x: torch.Tensor, times: int) -> torch.Tensor:
    return x * times


def shapes_of_operands() -> dict[str, tuple[str, str]]:
    """By op: a shape, and that which its case says of operands that were made for it."""
    size, found = dist.get_world_size(), {}
    for name, info in OPINFOS.items():
        shape = info.smaller(info.shapes[0], 512, size)
        ranks = size if name != "grouped_gemm" else 1
        operands = info.operands(shape, torch.float16, ranks)
        found[name] = (str(shape), str(info.shape_of(operands, ranks)))
    return found


def profile_and_shapes(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    return profile_calls(folder), shapes_of_operands()
