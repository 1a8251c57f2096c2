"""Check each load and store for out-of-bounds accesses and reads of uninitialised memory.

**Bounds**: an access must stay within the tensor or region that its pointer belongs to. The address
of an access is not sufficient to check this, because another tensor often follows directly.
Therefore a subclass of numpy's arrays stores addresses with their *origin*, the memory range that
the pointer belongs to. numpy passes the origin from operands to results. If a pointer was loaded
from memory, such as a peer's pointer, its origin is the region of symmetric memory that it points
to. Pointers without an origin are not checked.

**Uninitialised reads**: while the check is on, ``torch.empty`` and similar functions fill CPU
tensors with *poison*, a reserved bit pattern. A load of poison raises an error, even if the poison
was copied from other memory. For floating-point types, poison is a NaN that arithmetic never
produces. One-byte types have no unused value and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triton_dist.debugging.accesses import (
    ALLOCATIONS,
    POISON_FLOAT,
    POISON_INTEGER,
    Access,
    Observer,
    Undo,
    patch,
    poison_pattern,
    undo_all,
)
from triton_dist.debugging.faults import OutOfBounds, UninitialisedRead
from triton_dist.debugging.kernel_location import KernelLocation, current_location
from triton_dist.runtime import addresses


@dataclass(frozen=True)
class Origin:
    """The memory range that a pointer belongs to, and a ``description`` for messages."""

    begin: int
    end: int
    description: str


class Pointers(np.ndarray):
    """Array of addresses with a common origin."""

    origin: Origin | None

    def __array_finalize__(self, source: Any) -> None:
        self.origin = getattr(source, "origin", None)


def _with_origin(array: Any, origin: Origin | None) -> Any:
    if origin is None:
        return array
    pointers = np.asarray(array).view(Pointers)
    pointers.origin = origin
    return pointers


def _origin_of(array: Any) -> Origin | None:
    return getattr(array, "origin", None)


def origin_of_tensor(tensor: torch.Tensor) -> Origin:
    """Return the range from the tensor's first to its last element."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    description = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    region = addresses.region_at(begin) if tensor.numel() else None
    if region is not None:
        description = f"{description} in {region[2]}"
    return Origin(begin, begin + (last + 1) * tensor.element_size(), description)


def _region_of(pointers: Any) -> Origin | None:
    """Return the region of symmetric memory that contains all ``pointers``, or ``None``."""
    regions = {addresses.region_at(int(address)) for address in np.asarray(pointers).flat}
    region = regions.pop() if len(regions) == 1 else None
    return None if region is None else Origin(*region)


class BoundsCheck(Observer):
    """Raise ``OutOfBounds`` for accesses outside of the origin of their pointers."""

    def before(self, access: Access) -> None:
        origin = _origin_of(access.addresses)
        if origin is None:
            return
        accessed = np.asarray(access.accessed_addresses()).astype(np.int64, copy=False)
        outside = (accessed < origin.begin) | (accessed + access.itemsize > origin.end)
        if outside.any():
            raise OutOfBounds(
                _message(current_location(), access, origin, accessed[outside], accessed.size)
            )


def _message(
    location: KernelLocation, access: Access, origin: Origin, outside: Any, num_accessed: int
) -> str:
    size = access.itemsize
    before, after = origin.begin - int(outside.min()), int(outside.max()) + size - origin.end
    distance = max(before, after)
    side = "before its first element" if before > after else "after its last element"
    addresses = {
        name: getattr(getattr(value, "handle", None), "data", None)
        for name, value in location.arguments.items()
    }
    names = [name for name, address in addresses.items() if _origin_of(address) is origin]
    memory = origin.description
    owner = "" if " of rank " in memory else f", memory of rank {location.rank}"
    return (
        f"{location}: {access.operation} outside of "
        f"{names[0] + ', ' if names else ''}{memory}{owner}: "
        f"{outside.size} of {num_accessed} elements, the farthest is {distance} bytes "
        f"({-(-distance // size)} elements of {access.element_type}) {side}"
    )


def track_origins(upstream: Any) -> Undo:
    """Make the interpreter store the origin of addresses. Return a function that undoes this."""
    builder = upstream.InterpreterBuilder

    def argument(original: Any, arg: Any) -> Any:
        value, tensor = original(arg), getattr(arg, "base", arg)
        if isinstance(arg, torch.Tensor):
            tensor = arg
        if hasattr(arg, "data_ptr") and isinstance(tensor, torch.Tensor):
            value.handle.data = _with_origin(value.handle.data, origin_of_tensor(tensor))
        return value

    def keep_origin(operand: int) -> Callable[..., Any]:
        """Wrap an operation whose result loses the origin of operand number ``operand``."""

        def with_origin(original: Any, self: Any, *args: Any) -> Any:
            result = original(self, *args)
            result.data = _with_origin(result.data, _origin_of(args[operand].data))
            return result

        return with_origin

    def pointer_from_number(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
        result = original(self, src, dst_type)
        if _origin_of(src.data) is None:
            result.data = _with_origin(result.data, _region_of(src.data))
        return result

    def pointers(original: Any, self: Any, *args: Any) -> Any:
        result, mask = original(self, *args)
        result.data = _with_origin(result.data, _origin_of(self.base.data))
        return result, mask

    undos = [
        patch(upstream, "_implicit_cvt", argument),
        patch(builder, "create_splat", keep_origin(1)),
        patch(builder, "create_broadcast", keep_origin(0)),
        patch(builder, "create_int_to_ptr", pointer_from_number),
        patch(upstream.BlockPointerHandle, "materialize_pointers", pointers),
        patch(upstream.TensorDescHandle, "materialize_pointers", pointers),
    ]
    return undo_all(undos)


class UninitialisedCheck(Observer):
    """Raise ``UninitialisedRead`` for loads of poison."""

    def after(self, access: Access, values: Any) -> None:
        if access.operation != "load" or values is None or access.itemsize < 2:
            return
        bits = np.asarray(values).view(np.dtype(f"u{access.itemsize}"))
        found = bits == poison_pattern(bits.dtype, access.element_type.is_floating())
        if access.mask is not None:
            found = found & access.mask
        if found.any():
            first = int(np.flatnonzero(found)[0])
            raise UninitialisedRead(
                f"{current_location()}: {np.count_nonzero(found)} of {found.size} loaded elements "
                f"were never written since torch.empty, the first at index {first} of the block"
            )


def poison_empty() -> Undo:
    """Make ``torch.empty`` and similar functions fill CPU tensors with poison. Return a function
    that undoes this."""

    def poisoned(allocate: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = allocate(*args, **kwargs)
        is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if is_plain and tensor.element_size() > 1:
            is_float = tensor.is_floating_point() or tensor.is_complex()
            words = torch.tensor([], dtype=torch.int16).set_(tensor.untyped_storage())
            words.fill_(POISON_FLOAT if is_float else POISON_INTEGER)
        return tensor

    return undo_all([patch(owner, name, poisoned) for owner, name in ALLOCATIONS])
