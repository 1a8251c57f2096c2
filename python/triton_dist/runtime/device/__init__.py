"""The device of this process: one NVIDIA GPU, or the CPU with Triton's interpreter."""

from __future__ import annotations

import functools

import torch

from triton_dist import knobs
from triton_dist.errors import DeviceUnavailable
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.device.cuda import CudaDevice
from triton_dist.runtime.triton_compat import check_versions, is_interpreting


def current_device() -> CpuDevice | CudaDevice:
    """Return the device of this process. The first rule that applies decides:

    1. ``TRITON_DIST_DEVICE=cpu``: the CPU.
    2. ``TRITON_DIST_DEVICE=cuda``: the current GPU, or an error.
    3. ``TRITON_INTERPRET=1``: the CPU.
    4. The current GPU if there is one, else the CPU.

    Raises:
        DeviceUnavailable: CUDA was requested and no GPU can be used.
    """
    check_versions()
    requested = knobs.device.get()
    if requested == "cpu":
        return _cpu()
    if requested == "cuda":
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


def interprets_kernels() -> tuple[bool, str]:
    """Return whether kernels are interpreted, and the reason. The first rule that applies decides:

    1. ``TRITON_DIST_DEVICE=cuda``: compiled.
    2. ``TRITON_INTERPRET`` is set: interpreted if 1, compiled if 0.
    3. ``TRITON_DIST_DEVICE=cpu``, or torch finds no GPU: interpreted.
    4. Compiled.

    Scripts and commands set ``TRITON_INTERPRET`` to the result. Triton reads this variable when a
    kernel is decorated.
    """
    requested, variable = knobs.device.get(), knobs.triton_interpret.variable
    if requested == "cuda":
        return False, "TRITON_DIST_DEVICE=cuda"
    if given := knobs.environment().get(variable):
        return knobs.triton_interpret.get(), f"{variable}={given}"
    if requested == "cpu":
        return True, "TRITON_DIST_DEVICE=cpu"
    if torch.cuda.is_available():
        return False, "torch finds a GPU"
    return True, "torch finds no GPU"


@functools.cache
def _cpu() -> CpuDevice:
    return CpuDevice()


@functools.cache
def _cuda(index: int) -> CudaDevice:
    return CudaDevice(index)


def is_cuda() -> bool:
    """Return whether this process runs kernels on an NVIDIA GPU."""
    return current_device().name == "cuda"


def get_device_max_shared_memory_size(device_index: int | None = None) -> int:
    """Return the largest shared memory of one block, in bytes.

    Args:
        device_index: ignored, because all GPUs of a host are assumed to be equal. Accepted for
            existing scripts.
    """
    return current_device().shared_memory_bytes()


def sleep_async(milliseconds: float) -> None:
    """Keep the current stream busy for about ``milliseconds``. Block the host only on the CPU."""
    current_device().sleep_milliseconds(milliseconds)
