"""Peak rates of a GPU, by dtype."""

from __future__ import annotations

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.peaks import device_peak

# Relative to the 16-bit matrix rate; fp32 operands are multiplied as tf32.
_RELATIVE_RATE = {
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.float32: 0.5,
    torch.int8: 2.0,
    torch.float8_e4m3fn: 2.0,
    torch.float8_e5m2: 2.0,
}


def get_dram_gbps(device: torch.device | str | int | None = None) -> float:
    """Peak bandwidth of a GPU's memory in GB/s; default: of this process's GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return device_peak(index).memory_gbps


def get_tensorcore_tflops(dtype: torch.dtype) -> float:
    """Peak dense matrix rate of this process's GPU in TFLOP/s.

    Raises:
        InvalidArgument: a dtype that matrix units do not multiply.
    """
    if dtype not in _RELATIVE_RATE:
        known = ", ".join(map(str, _RELATIVE_RATE))
        raise InvalidArgument("get_tensorcore_tflops", "dtype", dtype, f"one of {known}")
    return device_peak().tflops * _RELATIVE_RATE[dtype]
