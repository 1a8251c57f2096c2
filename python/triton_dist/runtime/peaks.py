"""Peak rates of known GPUs, from datasheets, and of this host's network.

Matrix rates are dense, without sparsity. On H200, a matrix product on random data reaches 0.8 of
the 16-bit rate (790 of 989 TFLOP/s, measured). A copy reaches 0.9 of the memory bandwidth, and a
copy engine 0.88 of the link bandwidth.
"""

from __future__ import annotations

import functools
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from triton_dist.errors import InvalidArgument
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.cuda import CudaDevice


@dataclass(frozen=True)
class Peak:
    """The peak rates of a GPU model."""

    tflops: float
    """TFLOP/s of 16-bit matrix products."""
    memory_gbps: float
    """Bandwidth of the device memory in GB/s."""
    link_gbps: float
    """Bandwidth to other GPUs of the host in GB/s, one direction."""
    sms: int
    """Number of SMs."""


RELATIVE_RATE = {
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.float32: 0.5,
    torch.int8: 2.0,
    torch.float8_e4m3fn: 2.0,
    torch.float8_e5m2: 2.0,
}
"""Rates of matrix products relative to the 16-bit rate; fp32 operands are multiplied as TF32."""
_PCIE_GEN4_X16_GBPS = 32.0
_PEAK_BY_NAME = {
    "A100": Peak(312.0, 2039.0, 300.0, 108),
    "A800": Peak(312.0, 2039.0, 200.0, 108),
    "L40S": Peak(362.0, 864.0, _PCIE_GEN4_X16_GBPS, 142),
    "H20": Peak(148.0, 4000.0, 450.0, 78),
    "H800": Peak(989.0, 3350.0, 200.0, 132),
    "H100": Peak(989.0, 3350.0, 450.0, 132),
    "H200": Peak(989.0, 4800.0, 450.0, 132),
    "B200": Peak(2250.0, 8000.0, 900.0, 148),
}
_NAME_BY_CAPABILITY = {8: "A100", 9: "H100", 10: "B200"}


@functools.cache
def device_peak(index: int | None = None) -> Peak:
    """Return the peaks of this process's GPU, or of the GPU with CUDA ordinal ``index``.

    CPU ranks get the peaks of an H200, so that configs are pruned as on an H200. For a GPU that is
    not listed, the peaks of a listed GPU with the same compute capability are scaled by the number
    of SMs, and the links are assumed to be PCIe 4.
    """
    device = current_device()
    if device.name != "cuda":
        return _PEAK_BY_NAME["H200"]
    if index not in (None, device.torch_device.index):
        device = CudaDevice(index)
    facts = device.facts()
    matching = [name for name in _PEAK_BY_NAME if name in facts["gpu"]]
    if matching:
        return _PEAK_BY_NAME[
            max(matching, key=len)
        ]  # the longest match: "H20" is a prefix of "H200"
    reference = _PEAK_BY_NAME[
        _NAME_BY_CAPABILITY.get(int(facts["capability"].split(".")[0]), "A100")
    ]
    sms = int(facts["sms"])
    return Peak(
        reference.tflops * sms / reference.sms,
        reference.memory_gbps * sms / reference.sms,
        _PCIE_GEN4_X16_GBPS,
        sms,
    )


def get_dram_gbps(device: torch.device | str | int | None = None) -> float:
    """Return the peak memory bandwidth of a GPU in GB/s; default: this process's GPU."""
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return device_peak(index).memory_gbps


def get_tensorcore_tflops(dtype: torch.dtype) -> float:
    """Return the peak dense matrix rate of this process's GPU in TFLOP/s.

    Raises:
        InvalidArgument: matrix units do not support ``dtype``.
    """
    if dtype not in RELATIVE_RATE:
        known = ", ".join(map(str, RELATIVE_RATE))
        raise InvalidArgument("get_tensorcore_tflops", "dtype", dtype, f"one of {known}")
    return device_peak().tflops * RELATIVE_RATE[dtype]


def get_intranode_max_speed_gbps() -> float:
    """Return the peak bandwidth from this GPU to other GPUs of the host, one direction, in GB/s."""
    here = current_device()
    if here.name != "cuda":
        return 0.0  # CPU ranks have no links: they share memory
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != here.torch_device.index]
    linked = all(torch.cuda.can_device_access_peer(here.torch_device.index, gpu) for gpu in others)
    return device_peak().link_gbps if linked else _PCIE_GEN4_X16_GBPS


_SYSTEM_FOLDER = Path("/sys/class")


def get_nic_gbps_per_gpu(system: Path = _SYSTEM_FOLDER) -> float:
    """Return the network bandwidth per GPU of this host, one direction, in GB/s.

    This is the sum over all adapters that have the highest speed, divided by the number of GPUs.
    InfiniBand adapters are used if there are any, else Ethernet adapters. The result is 0.0 if the
    system reports no speed.

    Args:
        system: folder in which the operating system lists adapters.
    """
    rates = _infiniband(system / "infiniband") or _ethernet(system / "net")
    fastest = [rate for rate in rates if rate == max(rates)]
    return sum(fastest) / 8 / max(1, torch.cuda.device_count())


def _infiniband(folder: Path) -> list[float]:
    """Return the speed of each port in Gbit/s. A file contains text such as ``400 Gb/sec``."""
    found = (re.match(r"[\d.]+", _read_text(file)) for file in folder.glob("*/ports/*/rate"))
    return [float(rate.group()) for rate in found if rate is not None]


def _ethernet(folder: Path) -> list[float]:
    """Return the Gbit/s of each hardware adapter. A file contains Mbit/s, or -1 for "down"."""
    adapters = (path.parent for path in folder.glob("*/device"))
    speeds = (_read_text(adapter / "speed") for adapter in adapters)
    return [int(speed) / 1e3 for speed in speeds if speed.isdigit()]


def _read_text(file: Path) -> str:
    with suppress(OSError):  # reading the speed of an adapter that is down may fail
        return file.read_text().strip()
    return ""
