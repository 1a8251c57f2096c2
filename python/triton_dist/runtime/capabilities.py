"""Hardware features of this process's device, for scripts that check before they use a feature."""

from __future__ import annotations

import ctypes
import functools
import itertools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from triton_dist.errors import TritonDistWarning
from triton_dist.runtime.device import cuda_driver, current_device

P = ParamSpec("P")
R = TypeVar("R")

_NATIVE_ATOMIC_SUPPORTED = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def is_fp8_dtype(dtype: torch.dtype) -> bool:
    """Return True if ``dtype`` is an 8-bit floating-point type."""
    return dtype.is_floating_point and dtype.itemsize == 1


def has_tma() -> bool:
    """Return True if tensor descriptors compile to TMA: compute capability 9.0 and above."""
    device = current_device()
    return device.name == "cuda" and device.prefers_descriptors


def is_nvshmem_multimem_supported() -> bool:
    """Return ``False``: kernels of this package do not use multicast (NVLink SHARP)."""
    return False


def supports_p2p_native_atomic() -> bool:
    """Return True if this GPU supports atomics on the memory of every other GPU of the host. The
    result is also True for a single GPU, and for CPU ranks, which share memory."""
    device = current_device()
    if device.name != "cuda":
        return True
    own = device.torch_device.index
    others = (gpu for gpu in range(torch.cuda.device_count()) if gpu != own)
    return all(_has_native_atomics(own, gpu) for gpu in others)


def has_links_between_all_gpus() -> bool:
    """Return whether NVLink connects every pair of visible GPUs of this host. A pair counts as
    connected by NVLink if it supports atomics on each other's memory, which PCIe does not. The
    result is True for a single GPU, and for CPU ranks, which share memory."""
    if current_device().name != "cuda":
        return True
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    try:
        return all(_has_native_atomics(*pair) for pair in pairs)
    except RuntimeError:  # the driver rejects the query, for example for MIG instances
        return False


@functools.cache
def _has_native_atomics(source: int, target: int) -> bool:
    value = ctypes.c_int()
    ends = cuda_driver.device(source), cuda_driver.device(target)
    action = f"query peer access from GPU {source} to GPU {target}"
    result = ctypes.byref(value)
    cuda_driver.call("cuDeviceGetP2PAttribute", action, result, _NATIVE_ATOMIC_SUPPORTED, *ends)
    return value.value == 1


def requires_p2p_native_atomic(function: Callable[P, R]) -> Callable[P, R]:
    """Decorator for functions that need atomics on peers' memory. It warns if they are missing."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not supports_p2p_native_atomic():
            name = getattr(function, "__qualname__", repr(function))
            warnings.warn(
                f"{name} uses atomics on peers' memory, which the GPUs of this host do not "
                "support: counts may be lost. Use GPUs that are connected by NVLink.",
                TritonDistWarning,
                stacklevel=2,
            )
        return function(*args, **kwargs)

    return call
