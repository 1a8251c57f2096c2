"""CUDA driver functions that torch does not expose, or only with several times the host time."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

WAIT_VALUE_EQ = 0x1  # CU_STREAM_WAIT_VALUE_EQ
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle: lets another process of the host map memory."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_uint8 * 16),)


# Handles (streams, events, functions) are c_void_p, device addresses c_uint64.
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
    """Return the driver function ``name``, which returns a CUresult for :func:`check`."""
    found = getattr(ctypes.CDLL("libcuda.so.1"), name)
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_int
    return found  # type: ignore[no-any-return]


def arguments(name: str, *values: Any) -> tuple[Any, ...]:
    """Convert ``values`` to the C types of function ``name`` in advance, which halves a call's
    time."""
    return tuple(
        value if isinstance(value, kind) else kind(value)
        for kind, value in zip(_ARGUMENTS[name], values, strict=False)
    )


def check(status: int, what: str) -> None:
    """Raise ``RuntimeError`` with the error name and ``what`` unless ``status`` is 0.

    Raise ``MemoryError`` (not a ``RuntimeError``) if the driver is out of memory.
    """
    if status == OUT_OF_MEMORY:
        raise MemoryError(f"the CUDA driver refused to {what}: out of memory")
    if status != 0:
        name = ctypes.c_char_p()
        function("cuGetErrorName")(status, ctypes.byref(name))
        said = name.value.decode() if name.value else "unknown"
        raise RuntimeError(f"the CUDA driver refused to {what}: {said} ({status})")


def call(name: str, what: str, *values: Any) -> None:
    """Call the driver function ``name`` with ``values``, and check the result."""
    check(function(name)(*values), what)


def device(ordinal: int) -> int:
    found = ctypes.c_int()
    call("cuDeviceGet", f"find GPU {ordinal}", ctypes.byref(found), ordinal)
    return found.value


def primary_context(ordinal: int) -> int:
    """Return the primary context, which torch uses, of the GPU with this CUDA ordinal."""
    context = ctypes.c_void_p()
    what = f"return the context of GPU {ordinal}"
    call("cuDevicePrimaryCtxRetain", what, ctypes.byref(context), device(ordinal))
    return context.value or 0


def use_context(context: int) -> None:
    """Make ``context`` current on this thread if the thread, for example a new one, has none."""
    current = ctypes.c_void_p()
    call("cuCtxGetCurrent", "return the current context", ctypes.byref(current))
    if current.value is None:
        call("cuCtxSetCurrent", "use a context on another thread", context)
