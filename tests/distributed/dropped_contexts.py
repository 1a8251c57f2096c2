"""Contexts that are dropped without ``finalize()``: the same on CPU ranks and on GPUs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from triton_dist.kernels.nvidia import (
    ag_gemm,
    all_reduce,
    create_ag_gemm_context,
    create_allreduce_ctx,
    create_gemm_ar_context,
    create_gemm_rs_context,
    gemm_ar,
    gemm_rs,
)
from triton_dist.runtime.device import current_device

FP16 = torch.float16


def create(name: str, nbytes: int, side: int) -> Any:
    """A context of ``nbytes`` bytes or more, for products of matrices of ``side`` columns."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = -(-nbytes // (2 * side * FP16.itemsize * size)) * size  # two slots
    match name:
        case "ag_gemm":
            return create_ag_gemm_context(rows, side * size, side, FP16, rank, size)
        case "gemm_rs":
            return create_gemm_rs_context(rows, side, rank, size, size, FP16)
        case "gemm_ar":
            return create_gemm_ar_context(rows, side, rank, size, size, FP16)
    return create_allreduce_ctx(nbytes // 4, rank, size, size)


CALL: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "ag_gemm": lambda x, ctx: ag_gemm(x[:8], x, ctx, autotune=False),
    "gemm_rs": lambda x, ctx: gemm_rs(x[:8], x, ctx, autotune=False),
    "gemm_ar": lambda x, ctx: gemm_ar(x[:8], x, ctx, autotune=False),
    "all_reduce": lambda x, ctx: all_reduce(x[0], ctx, autotune=False),
}


def every(nbytes: int, times: int) -> dict[str, list[Any]]:
    return {name: dropped(name, nbytes, times) for name in CALL}


def dropped(name: str, nbytes: int, times: int, side: int = 32) -> list[Any]:
    """Create, call and drop ``times`` contexts of ``nbytes`` bytes or more, while the cyclic
    collector is off; what is left of them then."""
    x = torch.ones(side, side, dtype=FP16, device=current_device().torch_device)
    CALL[name](x, create(name, nbytes, side))  # what a first call leaves is not counted
    gc.collect()
    dist.barrier()
    before = _held()
    gc.disable()
    try:
        for _ in range(times):
            CALL[name](x, create(name, nbytes, side))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage = sorted({type(each).__qualname__ for each in gc.garbage if _is_ours(each)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return [garbage, *(now - then for now, then in zip(_held(), before, strict=True))]


def large_ones(name: str) -> list[Any]:
    """The same of contexts that do not all fit into the memory of this rank's GPU at once."""
    ranks = -(-dist.get_world_size() // torch.cuda.device_count())  # of a GPU
    nbytes = torch.cuda.mem_get_info()[1] // (8 * ranks)
    return dropped(name, nbytes, times=10, side=4096)


def _is_ours(each: object) -> bool:
    return isinstance(each, torch.Tensor) or type(each).__module__.startswith("triton_dist.")


def _held() -> tuple[int, ...]:
    """Bytes of shared memory that are mapped, and of GPU memory; copy threads that run."""
    threads = [each for each in threading.enumerate() if "copy-stream" in each.name]
    for thread in threads:
        thread.join(5)  # one that is to end has been told so
    mapped = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        mapped += (end - begin) * (permissions[3] == "s")
    gpu = torch.cuda.memory_allocated() if current_device().name == "cuda" else 0
    return mapped, gpu, sum(thread.is_alive() for thread in threads)
