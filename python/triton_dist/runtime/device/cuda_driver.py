"""CUDA driver functions that torch does not expose, or for which torch takes several times longer.

``allocate``, ``free``, ``export``, ``open_`` and ``close`` handle memory that several processes map
through CUDA IPC. Memory of torch cannot be used: it may be part of a larger block, and
``expandable_segments`` have no IPC handles. torch may also free it while other processes use it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

WAIT_VALUE_EQ = 0x1  # CU_STREAM_WAIT_VALUE_EQ
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_LAZY_PEER_ACCESS = 0x1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
# Sizes are rounded up to the driver's block size. The driver packs smaller allocations into one
# block, and IPC would share the whole block.
_BLOCK_BYTES = 2 << 20


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: lets another process of the host map memory."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_uint8 * 16),)


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D: rows of ``width`` bytes."""

    _fields_ = (
        *(
            (f"{side}_{name}", c_type)
            for side in ("source", "target")
            for name, c_type in (
                ("x", ctypes.c_size_t), ("y", ctypes.c_size_t), ("type", ctypes.c_uint),
                ("host", ctypes.c_void_p), ("device", ctypes.c_uint64),
                ("array", ctypes.c_void_p), ("pitch", ctypes.c_size_t),
            )
        ),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )  # fmt: skip


MEMORY_HOST, MEMORY_DEVICE = 1, 2  # CUmemorytype

# Handles (streams, events, functions) are c_void_p, device addresses c_uint64. The comments in the
# table name the arguments of a function.
_HANDLE, _ADDRESS, _UINT = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "cuCtxGetCurrent": (ctypes.POINTER(ctypes.c_void_p),),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    # value, attribute, device
    "cuDeviceGetAttribute": (ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int),
    "cuDeviceGetCount": (ctypes.POINTER(ctypes.c_int),),
    # value, attribute, source, target
    "cuDeviceGetP2PAttribute": (ctypes.POINTER(ctypes.c_int), *[ctypes.c_int] * 3),
    # text, its maximum length, device
    "cuDeviceGetPCIBusId": (ctypes.c_char_p, ctypes.c_int, ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(Uuid), ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int),
    "cuDriverGetVersion": (ctypes.POINTER(ctypes.c_int),),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuInit": (_UINT,),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), _ADDRESS),
    # address, handle, flags
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(ctypes.c_uint64), IpcHandle, _UINT),
    # function, grid, block, shared memory bytes, stream, parameters, extra
    "cuLaunchKernel": (_HANDLE, *[_UINT] * 6, _UINT, _HANDLE, ctypes.c_void_p, ctypes.c_void_p),
    "cuMemAlloc_v2": (ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t),
    "cuMemFree_v2": (_ADDRESS,),
    # free, total
    "cuMemGetInfo_v2": (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)),
    "cuMemcpy2DAsync_v2": (ctypes.POINTER(Memcpy2D), _HANDLE),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, _ADDRESS, ctypes.c_size_t, _HANDLE),
    "cuMemcpyHtoDAsync_v2": (_ADDRESS, ctypes.c_void_p, ctypes.c_size_t, _HANDLE),
    "cuStreamWaitEvent": (_HANDLE, _HANDLE, _UINT),
    "cuStreamWaitValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, _UINT),
    "cuStreamWriteValue32_v2": (_HANDLE, _ADDRESS, ctypes.c_uint32, _UINT),
}

Function = Callable[..., int]


@functools.cache
def function(name: str) -> Function:
    """Return the driver function ``name``. It returns a CUresult, to be passed to :func:`check`."""
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_int
    return found  # type: ignore[no-any-return]


def arguments(name: str, *values: Any) -> tuple[Any, ...]:
    """Convert ``values`` to the C types of function ``name``, which halves the time of a call."""
    return tuple(
        value if isinstance(value, c_type) else c_type(value)
        for c_type, value in zip(_ARGUMENTS[name], values, strict=False)
    )


def check(status: int, action: str) -> None:
    """Raise ``RuntimeError`` unless the CUresult ``status`` is 0. Raise ``MemoryError`` if the
    driver is out of memory. ``action`` is the attempted action for the message, such as ``"free
    shared memory"``."""
    if status == OUT_OF_MEMORY:
        raise MemoryError(f"the CUDA driver refused to {action}: out of memory")
    if status != 0:
        name = ctypes.c_char_p()
        function("cuGetErrorName")(status, ctypes.byref(name))
        error = name.value.decode() if name.value else "unknown"
        raise RuntimeError(f"the CUDA driver refused to {action}: {error} ({status})")


def call(name: str, action: str, *values: Any) -> None:
    check(function(name)(*values), action)


def device(ordinal: int) -> int:
    found = ctypes.c_int()
    call("cuDeviceGet", f"find GPU {ordinal}", ctypes.byref(found), ordinal)
    return found.value


def primary_context(ordinal: int) -> int:
    """Return the primary context of the GPU with this CUDA ordinal. torch uses this context."""
    context = ctypes.c_void_p()
    action = f"return the context of GPU {ordinal}"
    call("cuDevicePrimaryCtxRetain", action, ctypes.byref(context), device(ordinal))
    return context.value or 0


def use_context(context: int) -> None:
    """Make ``context`` current on this thread, unless the thread already has a context."""
    current = ctypes.c_void_p()
    call("cuCtxGetCurrent", "return the current context", ctypes.byref(current))
    if current.value is None:
        call("cuCtxSetCurrent", "use a context on another thread", context)


def use_gpu(ordinal: int) -> None:
    """Make the primary context of a GPU current on this thread, unless the thread has a context."""
    use_context(primary_context(ordinal))


def allocate(nbytes: int) -> int:
    """Allocate at least ``nbytes`` on the current GPU and return the address.

    Raises:
        MemoryError: the GPU has too little free memory.
    """
    address = ctypes.c_uint64()
    size = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
    call("cuMemAlloc_v2", f"allocate {size} bytes", ctypes.byref(address), size)
    return address.value


def free_bytes() -> int:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    action = "return the size of free memory"
    call("cuMemGetInfo_v2", action, ctypes.byref(free), ctypes.byref(total))
    return free.value


def free(address: int) -> None:
    """Free memory from ``allocate``. No other process may have the memory open."""
    call("cuMemFree_v2", "free shared memory", address)


def export(address: int) -> bytes:
    """Return a handle with which another process can open memory from ``allocate``."""
    handle = IpcHandle()
    call("cuIpcGetMemHandle", "export memory by CUDA IPC", ctypes.byref(handle), address)
    return bytes(handle)


def open_(handle: bytes) -> int:
    """Map the memory of another process and return its address in this process."""
    address = ctypes.c_uint64()
    call(
        "cuIpcOpenMemHandle_v2", "open memory of another process by CUDA IPC",
        ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _LAZY_PEER_ACCESS,
    )  # fmt: skip
    return address.value


def close(address: int) -> None:
    """Unmap memory that ``open_`` has mapped at ``address``."""
    call("cuIpcCloseMemHandle", "close shared memory", address)
