"""Pre-built kernel launches.

At each launch Triton binds and specialises all arguments, queries the driver for each pointer, and
allocates scratch memory for tensor descriptors. This takes 20 to 40 µs of host time. A pre-built
launch is a single driver call.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from triton_dist.runtime import marking
from triton_dist.runtime.device import cuda_driver

_C_INTEGER_TYPES: dict[str, Any] = {
    "i1": ctypes.c_int8, "i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32,
    "i64": ctypes.c_int64, "u1": ctypes.c_uint8, "u8": ctypes.c_uint8, "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32, "u64": ctypes.c_uint64,
}  # fmt: skip
_MISSING = object()


class RepeatedLaunch:
    """Pre-built launch of a compiled kernel.

    The kernel's parameters are the non-constant arguments (see ``parameters``) and the addresses of
    two scratch buffers, as in Triton 3.6 to 3.9. ``varying`` names the pointer arguments whose
    addresses differ between launches.
    """

    def __init__(
        self,
        compiled: Any,
        grid: Sequence[int],
        arguments: Mapping[str, Any],
        varying: Sequence[str],
        scratch: torch.Tensor | None,
    ) -> None:
        metadata = compiled.metadata
        c_values = {
            name: ctypes.c_uint64(value.data_ptr())
            if type_name[0] == "*"
            else _C_INTEGER_TYPES[type_name](value)
            for name, type_name, value in parameters(compiled.src.signature, arguments)
        }
        self._varying = [c_values[name] for name in varying]
        scratch_addresses = (
            ctypes.c_uint64(0 if scratch is None else scratch.data_ptr()),
            ctypes.c_uint64(),
        )
        all_c_values = [*c_values.values(), *scratch_addresses]
        self._parameters = (ctypes.c_void_p * len(all_c_values))(
            *map(ctypes.addressof, all_c_values)
        )
        self._keep_alive = (compiled, all_c_values, scratch)
        size = [*grid, 1, 1][:3]
        self._stream = ctypes.c_void_p()
        self._arguments = cuda_driver.arguments(
            "cuLaunchKernel",
            compiled.function, *size, metadata.num_warps * metadata.target.warp_size, 1, 1,
            metadata.shared, self._stream, ctypes.addressof(self._parameters), None,
        )  # fmt: skip
        self._launch = cuda_driver.function("cuLaunchKernel")
        self._name = metadata.name

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch on ``stream``. ``addresses``, in the order of ``varying``, must have the 16-byte
        alignment for which the kernel was compiled."""
        for c_value, address in zip(self._varying, addresses, strict=True):
            c_value.value = address
        self._stream.value = stream
        if status := self._launch(*self._arguments):
            cuda_driver.check(status, f"launch {self._name}")


def parameters(
    signature: Mapping[str, Any], arguments: Mapping[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Yield name, type in the signature, and value of each non-constant parameter. Members of a
    tuple are separate parameters, such as ``slot.epoch``, or ``pair.0`` for a tuple without names.
    The value of an argument that ``arguments`` does not contain is ``_MISSING``."""
    for name, type_name in signature.items():
        value = arguments.get(name, _MISSING)
        if isinstance(type_name, tuple):
            members = getattr(value, "_fields", range(len(type_name)))
            values = [_MISSING] * len(type_name) if value is _MISSING else value
            names = [f"{name}.{member}" for member in members]
            type_names = dict(zip(names, type_name, strict=True))
            yield from parameters(type_names, dict(zip(names, values, strict=True)))
        elif type_name != "constexpr":
            yield name, type_name, value


def can_repeat(compiled: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether ``RepeatedLaunch`` supports this kernel and these arguments."""
    metadata = getattr(compiled, "metadata", None)
    if metadata is None:  # interpreted, or not compiled by Triton
        return False
    is_plain_launch = (
        getattr(metadata, "num_ctas", 1) == 1
        and not getattr(metadata, "launch_cooperative_grid", False)
        and not getattr(metadata, "launch_pdl", False)
        and not getattr(metadata, "profile_scratch_size", 0)
    )
    return is_plain_launch and all(
        value is not _MISSING and (type_name[0] == "*" or type_name in _C_INTEGER_TYPES)
        for _, type_name, value in parameters(compiled.src.signature, arguments)
    )


def scratch_bytes(compiled: Any, grid: Sequence[int]) -> int:
    """Return the size of the scratch memory for tensor descriptors of all programs, in bytes."""
    return int(compiled.metadata.global_scratch_size) * math.prod(grid)


def must_launch_through_triton() -> bool:
    """Return whether launches must go through Triton: a profiler has set launch hooks, or kernels
    record ``dl.mark`` intervals."""
    knobs = triton.knobs.runtime
    return marking.current() is not None or any(
        hook is not None and getattr(hook, "calls", True)
        for hook in (knobs.launch_enter_hook, knobs.launch_exit_hook)
    )
