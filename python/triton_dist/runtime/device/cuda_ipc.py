"""Memory of one GPU that several processes map, by CUDA IPC.

Allocated by the driver and not by torch, whose blocks may lie inside of others, move to
``expandable_segments``, which have no IPC handles, and are freed when torch's own counts say so.
"""

from __future__ import annotations

import ctypes

from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.device.cuda_driver import IpcHandle

_LAZY_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
# The driver puts smaller blocks together into one of this size, and IPC shares the whole of it.
_UNIT = 2 << 20


def use_gpu(ordinal: int) -> None:
    """Give the calling thread a context on the GPU with this CUDA ordinal, unless it has one."""
    cuda_driver.use_context(cuda_driver.primary_context(ordinal))


def allocate(nbytes: int) -> int:
    """Address of ``nbytes`` new bytes, or a few more, on the current GPU.

    Raises:
        MemoryError: it has too few.
    """
    address = ctypes.c_uint64()
    size = -(-nbytes // _UNIT) * _UNIT
    status = cuda_driver.function("cuMemAlloc_v2")(ctypes.byref(address), size)
    cuda_driver.check(status, f"allocate {size} bytes")
    return address.value


def free_bytes() -> int:
    """Bytes of the current GPU that no process has."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    status = cuda_driver.function("cuMemGetInfo_v2")(ctypes.byref(free), ctypes.byref(total))
    cuda_driver.check(status, "tell how much memory is free")
    return free.value


def free(address: int) -> None:
    """Give back what ``allocate`` gave; undefined while another process has it open."""
    cuda_driver.check(cuda_driver.function("cuMemFree_v2")(address), "free shared memory")


def export(address: int) -> bytes:
    """Handle by which another process can open what ``allocate`` gave."""
    handle = IpcHandle()
    status = cuda_driver.function("cuIpcGetMemHandle")(ctypes.byref(handle), address)
    cuda_driver.check(status, "export memory by CUDA IPC")
    return bytes(handle)


def open_(handle: bytes) -> int:
    """Address of another process's memory here."""
    address = ctypes.c_uint64()
    status = cuda_driver.function("cuIpcOpenMemHandle_v2")(
        ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS
    )
    cuda_driver.check(status, "open memory of another process by CUDA IPC")
    return address.value


def close(address: int) -> None:
    """Give back what ``open_`` gave."""
    cuda_driver.check(cuda_driver.function("cuIpcCloseMemHandle")(address), "close shared memory")
