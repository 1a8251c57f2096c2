"""Time calls and profile code on this rank, and wait until the GPU runs at its maximum clock."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, TypeVar

import torch

from triton_dist import knobs
from triton_dist.errors import InvalidArgument, TritonDistWarning
from triton_dist.runtime.device import current_device

T = TypeVar("T")


def perf_func(func: Callable[[], T], iters: int, warmup_iters: int) -> tuple[T, float]:
    """Return the last output and the mean time in ms of back-to-back calls on this rank.

    One timed region has all ``iters`` calls, after ``warmup_iters`` untimed calls. Caches are warm.

    Raises:
        InvalidArgument: ``iters`` is below 1.
    """
    _check_iters("perf_func", iters)
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
    """Return the last output and the mean time in ms of calls on this rank with a cold L2 cache.

    The last-level cache is flushed before each call; only the calls are timed.

    Raises:
        InvalidArgument: ``iters`` is below 1.
    """
    _check_iters("perf_func_with_l2_reset", iters)
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


def benchmark_latency_memory(
    func: Callable[[], object],
    iters: int = 100,
    warmup_iters: int = 10,
    pre_func: Callable[[], object] | None = None,
) -> tuple[float, float]:
    """Return the mean time of a call in ms, and the peak memory that a call allocates in MiB.

    The memory is 0 on CPU ranks. ``pre_func`` runs before each warm-up call and before the call
    whose memory is measured.
    """
    device, prepare = current_device(), pre_func or (lambda: None)
    for _ in range(warmup_iters):
        prepare()
        func()
    _, milliseconds = perf_func(func, iters, 0)
    prepare()
    device.synchronize()
    if device.name != "cuda":
        return milliseconds, 0.0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    func()
    device.synchronize()
    return milliseconds, (torch.cuda.max_memory_allocated() - before) / 2**20


def print_benchmark_comparison(
    all_implementations: Mapping[Any, Mapping[str, Mapping[str, Any]]],
    test_name: str = "",
    param_names: Sequence[str] | None = None,
    title_params: Mapping[str, object] | None = None,
) -> None:
    """Print a table with a row for each configuration and a column for each implementation.

    Args:
        all_implementations: for each configuration (a tuple of parameters or one value) and each
            implementation: ``latency`` or ``time`` in ms, ``memory`` in MiB and ``precision``
            (whether results are correct, or a text).
        test_name: first words of the title.
        param_names: names of the parameters; default: ``param_0`` and so on.
        title_params: parameters that the title shows instead of a column.
    """
    hidden = title_params or {}
    title = ", ".join(f"{name}={value}" for name, value in hidden.items())
    print(f"\n{test_name} {title and f'({title}) '}latency (ms) / peak memory (MiB) / precision")
    results = [name for each in all_implementations.values() for name in each]
    configs = [each if isinstance(each, tuple) else (each,) for each in all_implementations]
    longest, given = max(map(len, configs), default=0), list(param_names or ())
    names = [*given, *(f"param_{i}" for i in range(len(given), longest))][:longest]
    rows: list[dict[str, str]] = []
    for config, implementations in zip(configs, all_implementations.values(), strict=True):
        row = {name: str(value) for name, value in zip_longest(names, config, fillvalue="")}
        for name in dict.fromkeys(results):
            row[name] = _result_text(implementations.get(name))
        rows.append({name: text for name, text in row.items() if name not in hidden})
    table = [{name: name for name in rows[0]}, *rows] if rows else []
    for row in table:
        width = {name: max(len(each[name]) for each in table) for name in row}
        print("  ".join(text.rjust(width[name]) for name, text in row.items()))


def _result_text(data: Mapping[str, Any] | None) -> str:
    if data is None:
        return "N/A"
    latency = data.get("latency", data.get("time", 0.0))
    precision = data.get("precision", "unknown")
    if precision is None:
        precision = "N/A"
    if isinstance(precision, bool):
        precision = "correct" if precision else "wrong"
    return f"{latency:.3f} / {data.get('memory', 0.0):.2f} / {precision}"


def _check_iters(function: str, iters: int) -> None:
    if not isinstance(iters, int) or iters < 1:
        raise InvalidArgument(function, "iters", iters, "an int, 1 or more")


def get_torch_prof_ctx(do_prof: bool = True) -> AbstractContextManager[Any]:
    """Return torch's profiler, which records shapes; or a null context if ``do_prof`` is False."""
    # acc_events only matters for schedules with several cycles, but torch 2.11 warns without it.
    return torch.profiler.profile(record_shapes=True, acc_events=True) if do_prof else nullcontext()


def timeline_profile() -> torch.autograd.profiler.profile:
    """Return torch's autograd profiler. The public ``torch.profiler`` uses it, but imports torch's
    compiler, which takes 2 s."""
    _skip_destructors_in_forks()
    device = "cuda" if torch.cuda.is_available() else None
    return torch.autograd.profiler.profile(use_device=device, use_kineto=True, acc_events=True)


_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 1.0


def wait_until_max_gpu_clock_or_warning(
    device_id: int | None = None, timeout_sec: float = 10
) -> bool:
    """Wait until the GPU's SMs run at their maximum clock. Return whether they do.

    Return ``True`` without waiting on CPU ranks, and unless ``TRITON_DIST_WAIT_GPU_CLOCK`` is set.
    An idle GPU whose clocks are not locked would reduce its clock during the wait.

    Args:
        device_id: CUDA ordinal; default: this process's GPU.
        timeout_sec: time limit in seconds, after which a warning reports the clock.
    """
    device = current_device()
    if not knobs.wait_gpu_clock.get() or device.name != "cuda":
        return True
    index = device.torch_device.index if device_id is None else device_id
    name = f"cuda:{index}"
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return _wait_for_max_clock(name, lambda: _clocks_in_mhz(uuid), timeout_sec)


def _wait_for_max_clock(
    name: str, read_clocks: Callable[[], tuple[int, int]], seconds: float
) -> bool:
    """Wait for the maximum clock; ``read_clocks`` returns the present and the maximum MHz."""
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while True:
        try:
            clock, max_clock = read_clocks()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return _warn(f"{name}: nvidia-smi does not report the SM clock: {error}")
        if clock >= max_clock:
            return True
        if time.monotonic() + pause > end:
            return _warn(
                f"{name}: the SM clock is {clock} MHz after {seconds} s, its maximum is "
                f"{max_clock} MHz; measured times will be too long. Check other processes, heat "
                "and the power limit."
            )
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


def _warn(text: str) -> bool:
    warnings.warn(text, TritonDistWarning, stacklevel=4)
    return False


def _clocks_in_mhz(uuid: str) -> tuple[int, int]:
    query = "--query-gpu=clocks.sm,clocks.max.sm"
    command = ["nvidia-smi", "-i", uuid, query, "--format=csv,noheader,nounits"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    clock, max_clock = map(int, output.split(","))
    return clock, max_clock


@functools.cache
def _skip_destructors_in_forks() -> None:
    """Make forked children of this process exit without destructors of libraries. The destructor of
    torch's profiler waits for a thread that a forked child does not have. The child would hang at
    its exit, or abort (torch 2.13)."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "on_exit"):  # not glibc
        return

    def add_exit_handlers() -> None:
        libc.on_exit(libc._exit, None)  # called with the exit status, after ``fflush``
        libc.__cxa_atexit(libc.fflush, None, None)  # handlers run in reverse order

    os.register_at_fork(after_in_child=add_exit_handlers)
