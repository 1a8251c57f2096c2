"""Chooses the device of this process."""

from __future__ import annotations

import functools

import torch

from triton_dist import knobs
from triton_dist.errors import DeviceUnavailable
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.device.cuda import CudaDevice
from triton_dist.runtime.triton_compat import check_versions, is_interpreting


def current_device() -> CpuDevice | CudaDevice:
    """The device of this process, in this order:

    1. ``TRITON_DIST_DEVICE=cpu``: the CPU.
    2. ``TRITON_DIST_DEVICE=cuda``: the current GPU; none there raises.
    3. Kernels are interpreted (``TRITON_INTERPRET=1``): the CPU.
    4. The current GPU if there is one, else the CPU.

    Raises:
        DeviceUnavailable: CUDA was asked for and no GPU can be used.
    """
    check_versions()
    asked = knobs.device.get()
    if asked == "cpu":
        return _cpu()
    if asked == "cuda":
        if not torch.cuda.is_available():
            raise DeviceUnavailable(
                "cuda",
                "torch.cuda.is_available() is False",
                "Run on a host with an NVIDIA GPU and a CUDA build of torch, or set "
                "TRITON_DIST_DEVICE=cpu.",
            )
        return _cuda(torch.cuda.current_device())
    if is_interpreting() or not torch.cuda.is_available():
        return _cpu()
    return _cuda(torch.cuda.current_device())


@functools.cache
def _cpu() -> CpuDevice:
    return CpuDevice()


@functools.cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(index)
