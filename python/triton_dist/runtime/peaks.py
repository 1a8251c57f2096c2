"""Datasheet peaks of known GPUs, for limits and for pruning, and the network links of this host.

Dense rates, without sparsity. A matrix product on random data reaches about 0.8 of the 16-bit rate
on H200 (790 of 989 TFLOP/s, measured), a copy 0.9 of the memory bandwidth, and a copy engine 0.88
of a link.
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
    """One GPU's peaks."""

    tflops: float
    """16-bit matrix TFLOP/s."""
    memory_gbps: float
    """Device memory GB/s."""
    link_gbps: float
    """GB/s to its peers on the host, one direction."""
    sms: int


RELATIVE_RATE = {
    torch.float16: 1.0,
    torch.bfloat16: 1.0,
    torch.float32: 0.5,
    torch.int8: 2.0,
    torch.float8_e4m3fn: 2.0,
    torch.float8_e5m2: 2.0,
}
"""Matrix rates relative to the 16-bit one; fp32 operands are multiplied as tf32."""
_PCIE_GEN4_X16 = 32.0
_BY_NAME = {
    "A100": Peak(312.0, 2039.0, 300.0, 108),
    "A800": Peak(312.0, 2039.0, 200.0, 108),
    "L40S": Peak(362.0, 864.0, _PCIE_GEN4_X16, 142),
    "H20": Peak(148.0, 4000.0, 450.0, 78),
    "H800": Peak(989.0, 3350.0, 200.0, 132),
    "H100": Peak(989.0, 3350.0, 450.0, 132),
    "H200": Peak(989.0, 4800.0, 450.0, 132),
    "B200": Peak(2250.0, 8000.0, 900.0, 148),
}
_BY_CAPABILITY = {8: "A100", 9: "H100", 10: "B200"}


@functools.cache
def device_peak(index: int | None = None) -> Peak:
    """Peaks of this process's GPU, or of the one with CUDA ordinal ``index``; on CPU ranks those of
    H200, so that pruning acts as it would there.

    A GPU that is not listed is taken for the listed one of its compute capability, scaled by its
    number of SMs, behind PCIe.
    """
    device = current_device()
    if device.name != "cuda":
        return _BY_NAME["H200"]
    if index not in (None, device.torch_device.index):
        device = CudaDevice(index)
    facts = device.facts()
    fitting = [name for name in _BY_NAME if name in facts["gpu"]]
    if fitting:
        return _BY_NAME[max(fitting, key=len)]  # the longest: "H200" must not be taken for "H20"
    alike = _BY_NAME[_BY_CAPABILITY.get(int(facts["capability"].split(".")[0]), "A100")]
    sms = int(facts["sms"])
    return Peak(
        alike.tflops * sms / alike.sms, alike.memory_gbps * sms / alike.sms, _PCIE_GEN4_X16, sms
    )


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


def get_intranode_max_speed_gbps() -> float:
    """Peak bandwidth from this GPU to its peers on the host, one direction, in GB/s."""
    here = current_device()
    if here.name != "cuda":
        return 0.0  # CPU ranks share memory
    others = [gpu for gpu in range(torch.cuda.device_count()) if gpu != here.torch_device.index]
    linked = all(torch.cuda.can_device_access_peer(here.torch_device.index, gpu) for gpu in others)
    return device_peak().link_gbps if linked else _PCIE_GEN4_X16


_SYSTEM = Path("/sys/class")


def get_nic_gbps_per_gpu(system: Path = _SYSTEM) -> float:
    """Bandwidth to other hosts for each GPU of this one, one direction, in GB/s.

    The fastest adapters count, InfiniBand ones if there are any, and are shared evenly. 0.0 where
    the system tells no speed. ``system``: where it lists them.
    """
    rates = _infiniband(system / "infiniband") or _ethernet(system / "net")
    fastest = [rate for rate in rates if rate == max(rates)]
    return sum(fastest) / 8 / max(1, torch.cuda.device_count())


def _infiniband(folder: Path) -> list[float]:
    """Gbit/s of each port, written as ``400 Gb/sec (4X NDR)``."""
    found = (re.match(r"[\d.]+", _text(file)) for file in folder.glob("*/ports/*/rate"))
    return [float(rate.group()) for rate in found if rate is not None]


def _ethernet(folder: Path) -> list[float]:
    """Gbit/s of each adapter that is hardware, written in Mbit/s; -1 if it is down."""
    adapters = (path.parent for path in folder.glob("*/device"))
    speeds = (_text(adapter / "speed") for adapter in adapters)
    return [int(speed) / 1e3 for speed in speeds if speed.isdigit()]


def _text(file: Path) -> str:
    with suppress(OSError):  # an adapter that is down may refuse to tell
        return file.read_text().strip()
    return ""
