"""Peak rates of a GPU, by dtype."""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.peaks import RELATIVE_RATE, device_peak


def get_dram_gbps(device: torch.device | str | int | None = None) -> float:
    """Peak bandwidth of a GPU's memory in GB/s; default: of this process's GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return device_peak(index).memory_gbps


def get_tensorcore_tflops(dtype: torch.dtype) -> float:
    """Peak dense matrix rate of this process's GPU in TFLOP/s.

    Raises:
        InvalidArgument: a dtype that matrix units do not multiply.
    """
    if dtype not in RELATIVE_RATE:
        known = ", ".join(map(str, RELATIVE_RATE))
        raise InvalidArgument("get_tensorcore_tflops", "dtype", dtype, f"one of {known}")
    return device_peak().tflops * RELATIVE_RATE[dtype]
