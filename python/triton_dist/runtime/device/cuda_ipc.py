"""Device memory that several processes map through CUDA IPC.

The driver allocates it. Torch's blocks do not work: they may be parts of larger blocks,
``expandable_segments`` have no IPC handles, and torch frees blocks by its own reference counts.
"""

from __future__ import annotations

import ctypes

from triton_dist.runtime.device import cuda_driver
from triton_dist.runtime.device.cuda_driver import IpcHandle

_LAZY_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
# Sizes are rounded up to the driver's block size: it packs smaller allocations into one block, and
# IPC would share all of them.
_UNIT = 2 << 20


def use_gpu(ordinal: int) -> None:
    """Create a context on the GPU with this CUDA ordinal if this thread has none."""
    cuda_driver.use_context(cuda_driver.primary_context(ordinal))


def allocate(nbytes: int) -> int:
    """Allocate at least ``nbytes`` on the current GPU and return the address.

    Raises:
        MemoryError: the GPU has too little free memory.
    """
    address = ctypes.c_uint64()
    size = -(-nbytes // _UNIT) * _UNIT
    cuda_driver.call("cuMemAlloc_v2", f"allocate {size} bytes", ctypes.byref(address), size)
    return address.value


def free_bytes() -> int:
    """Return the free memory of the current GPU."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    what = "return the size of free memory"
    cuda_driver.call("cuMemGetInfo_v2", what, ctypes.byref(free), ctypes.byref(total))
    return free.value


def free(address: int) -> None:
    """Free memory of ``allocate``. No other process may have the memory open."""
    cuda_driver.call("cuMemFree_v2", "free shared memory", address)


def export(address: int) -> bytes:
    """Return a handle with which another process can open memory of ``allocate``."""
    handle = IpcHandle()
    what = "export memory by CUDA IPC"
    cuda_driver.call("cuIpcGetMemHandle", what, ctypes.byref(handle), address)
    return bytes(handle)


def open_(handle: bytes) -> int:
    """Map another process's memory and return its address."""
    address = ctypes.c_uint64()
    cuda_driver.call(
        "cuIpcOpenMemHandle_v2", "open memory of another process by CUDA IPC",
        ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS,
    )  # fmt: skip
    return address.value


def close(address: int) -> None:
    """Unmap memory of ``open_``."""
    cuda_driver.call("cuIpcCloseMemHandle", "close shared memory", address)
