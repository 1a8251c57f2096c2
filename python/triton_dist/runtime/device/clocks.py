"""The SM clock of a GPU, as ``nvidia-smi`` tells it."""

from __future__ import annotations

import subprocess
import time
import warnings
from collections.abc import Callable

import torch

from triton_dist import knobs
from triton_dist.errors import TritonDistWarning
from triton_dist.runtime.device.detect import current_device

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


def wait_until_max_gpu_clock_or_warning(
    device_id: int | None = None, timeout_sec: float = 10
) -> bool:
    """Wait until the GPU's SMs run at their top clock; whether they do.

    Unless ``TRITON_DIST_WAIT_GPU_CLOCK`` is set nothing is waited for, and ``True`` returned: a GPU
    that is not held in its performance mode slows down while it waits. On CPU ranks the same.

    Args:
        device_id: CUDA ordinal; default: this process's GPU.
        timeout_sec: seconds after which a warning says how far it came.
    """
    device = current_device()
    if not knobs.wait_gpu_clock.get() or device.name != "cuda":
        return True
    index = device.torch_device.index if device_id is None else device_id
    name = f"cuda:{index}"
    uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
    return _wait(name, lambda: _megahertz(uuid), timeout_sec)


def _wait(name: str, read: Callable[[], tuple[int, int]], seconds: float) -> bool:
    """``read`` gives the present clock and the top one, in MHz."""
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            now, top = read()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return _warn(f"{name}: nvidia-smi does not tell the SM clock: {error}")
        if now >= top:
            return True
        if time.monotonic() + pause > end:
            return _warn(
                f"{name}: the SM clock is {now} MHz after {seconds} s, its top is {top} MHz; times "
                "that are measured now are too long. Other work, heat or a power limit holds it."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _warn(text: str) -> bool:
    warnings.warn(text, TritonDistWarning, stacklevel=4)
    return False


def _megahertz(uuid: str) -> tuple[int, int]:
    query = "--query-gpu=clocks.sm,clocks.max.sm"
    command = ["nvidia-smi", "-i", uuid, query, "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    now, top = map(int, told.split(","))
    return now, top
