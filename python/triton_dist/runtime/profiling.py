"""Timing a call, and tracing a region on this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device

T = TypeVar("T")


def perf_func(func: Callable[[], T], iters: int, warmup_iters: int) -> tuple[T, float]:
    """Mean time of back-to-back calls on this rank.

    One timed region around all ``iters`` calls after ``warmup_iters`` untimed ones, caches warm:
    the steady state. Returns the last output and the milliseconds of one call.

    Raises:
        InvalidArgument: ``iters`` is below 1.
    """
    _refuse_none("perf_func", iters)
    device = current_device()
    for _ in range(warmup_iters):
        func()
    device.synchronize()
    timer = device.timer()
    timer.start()
    for _ in range(iters):
        output = func()
    timer.stop()
    device.synchronize()
    return output, timer.milliseconds() / iters


def perf_func_with_l2_reset(
    func: Callable[[], T], iters: int, warmup_iters: int
) -> tuple[T, float]:
    """Mean time of calls on this rank, each after the last-level cache was flushed.

    Only the calls are timed. Returns the last output and the milliseconds of one call.

    Raises:
        InvalidArgument: ``iters`` is below 1.
    """
    _refuse_none("perf_func_with_l2_reset", iters)
    device = current_device()
    timers = [device.timer() for _ in range(iters)]
    for _ in range(warmup_iters):
        func()
    for timer in timers:
        device.flush_cache()
        timer.start()
        output = func()
        timer.stop()
    device.synchronize()
    return output, sum(timer.milliseconds() for timer in timers) / iters


def _refuse_none(function: str, iters: int) -> None:
    if not isinstance(iters, int) or iters < 1:
        raise InvalidArgument(function, "iters", iters, "an int, 1 or more")


def get_torch_prof_ctx(do_prof: bool = True) -> AbstractContextManager[Any]:
    """torch's profiler of this rank, with shapes; without ``do_prof`` nothing, as ``None``."""
    # Of one cycle all is kept anyway; without saying so, torch 2.11 warns.
    return torch.profiler.profile(record_shapes=True, acc_events=True) if do_prof else nullcontext()


def timeline_profile() -> torch.autograd.profiler.profile:
    """Part that torch's profiler stands on. That one imports torch's compiler as it starts: 2 s."""
    device = "cuda" if torch.cuda.is_available() else None
    return torch.autograd.profiler.profile(use_device=device, use_kineto=True, acc_events=True)
