"""Checks of each load and store: within bounds, and not of memory that was never written.

**Bounds**: an access must stay within the tensor or region that its pointer was made from. An
address does not tell that, since the next region usually follows directly. Therefore arrays of
addresses carry their *origin*: they are of a class that numpy hands on from operand to result. A
pointer that was read from memory, such as a peer's from a table, has the region of symmetric memory
that it points into. Where neither is known, nothing is checked.

**Uninitialised reads**: while the check is on, the ``torch.empty`` family returns CPU tensors that
are filled with a pattern, and a kernel that loads the pattern is refused. A copy of such memory has
the pattern too. In floating-point types the pattern is a NaN that arithmetic never produces.
One-byte integers have no value to spare and are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triton_dist.debugging.accesses import (
    ALLOCATIONS,
    FLOATS,
    INTEGERS,
    Access,
    Undo,
    pattern,
    replace,
    undo_all,
)
from triton_dist.debugging.faults import OutOfBounds, UninitialisedRead
from triton_dist.debugging.site import Site, site
from triton_dist.runtime import addresses


@dataclass(frozen=True)
class Origin:
    """Bytes ``begin`` to ``end`` of what a pointer was made from; ``what`` it is, for messages."""

    begin: int
    end: int
    what: str


class Pointers(np.ndarray):
    """An array of addresses that all have one origin."""

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


def of_tensor(tensor: torch.Tensor) -> Origin:
    """From the tensor's first element to its last: not the storage, of which it may be a part."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps) if tensor.numel() else -1
    shape = list(tensor.shape)
    what = f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
    region = addresses.region_at(begin) if tensor.numel() else None
    if region is not None:
        what = f"{what} in {region[2]}"
    return Origin(begin, begin + (last + 1) * tensor.element_size(), what)


def _of_addresses(pointers: Any) -> Origin | None:
    """The region of symmetric memory that all of ``pointers`` point into, if it is one."""
    regions = {addresses.region_at(int(address)) for address in np.asarray(pointers).flat}
    region = regions.pop() if len(regions) == 1 else None
    return None if region is None else Origin(*region)


class Bounds:
    """Refuses accesses outside of the origin of their pointers."""

    def before(self, access: Access) -> None:
        origin = _origin_of(access.addresses)
        if origin is None:
            return
        touched = np.asarray(access.touched()).astype(np.int64, copy=False)
        outside = (touched < origin.begin) | (touched + access.itemsize > origin.end)
        if outside.any():
            raise OutOfBounds(_message(site(), access, origin, touched[outside], touched.size))

    def after(self, access: Access, values: Any) -> None:
        """Nothing: what is read does not matter."""


def _message(at: Site, access: Access, origin: Origin, outside: Any, of: int) -> str:
    size = access.itemsize
    before, behind = origin.begin - int(outside.min()), int(outside.max()) + size - origin.end
    far = max(before, behind)
    side = "before its first element" if before > behind else "behind its last element"
    names = [name for name, value in at.values.items() if _argument_is(value, origin)]
    owner = "" if " of rank " in origin.what else f", memory of rank {at.rank}"
    return (
        f"{at}: {access.kind} outside of {names[0] + ', ' if names else ''}{origin.what}{owner}: "
        f"{outside.size} of {of} elements, the farthest ends {far} bytes ({-(-far // size)} "
        f"elements of {access.element}) {side}"
    )


def _argument_is(value: Any, origin: Origin) -> bool:
    return _origin_of(getattr(getattr(value, "handle", None), "data", None)) is origin


def track_origins(upstream: Any) -> Undo:
    """Let addresses in ``upstream``, the module ``triton.runtime.interpreter``, carry their
    origin, until undone."""
    builder = upstream.InterpreterBuilder

    def argument(original: Any, arg: Any) -> Any:
        value, tensor = original(arg), getattr(arg, "base", arg)
        if isinstance(arg, torch.Tensor):
            tensor = arg
        if hasattr(arg, "data_ptr") and isinstance(tensor, torch.Tensor):
            value.handle.data = _with_origin(value.handle.data, of_tensor(tensor))
        return value

    def keeping(place: int) -> Callable[..., Any]:
        """The result of what numpy does not hand the class on in; ``place`` of the operand."""

        def made(original: Any, self: Any, *args: Any) -> Any:
            result = original(self, *args)
            result.data = _with_origin(result.data, _origin_of(args[place].data))
            return result

        return made

    def from_number(original: Any, self: Any, src: Any, dst_type: Any) -> Any:
        result = original(self, src, dst_type)
        if _origin_of(src.data) is None:
            result.data = _with_origin(result.data, _of_addresses(src.data))
        return result

    def pointers(original: Any, self: Any, *args: Any) -> Any:
        result, mask = original(self, *args)
        result.data = _with_origin(result.data, _origin_of(self.base.data))
        return result, mask

    undos = [
        replace(upstream, "_implicit_cvt", argument),
        replace(builder, "create_splat", keeping(1)),
        replace(builder, "create_broadcast", keeping(0)),
        replace(builder, "create_int_to_ptr", from_number),
        replace(upstream.BlockPointerHandle, "materialize_pointers", pointers),
        replace(upstream.TensorDescHandle, "materialize_pointers", pointers),
    ]
    return undo_all(undos)


class Uninitialised:
    """Refuses loads of the pattern."""

    def before(self, access: Access) -> None:
        """Nothing: it shows in what is read."""

    def after(self, access: Access, values: Any) -> None:
        if access.kind != "load" or values is None or access.itemsize < 2:
            return
        bits = np.asarray(values).view(np.dtype(f"u{access.itemsize}"))
        found = bits == pattern(bits.dtype, access.element.is_floating())
        if access.mask is not None:
            found = found & access.mask
        if found.any():
            first = int(np.flatnonzero(found)[0])
            raise UninitialisedRead(
                f"{site()}: {np.count_nonzero(found)} of {found.size} elements that are loaded "
                f"were never written since torch.empty, the first at index {first} of the block"
            )


def poison_empty() -> Undo:
    """Fill what the ``torch.empty`` family returns with the pattern, until undone."""

    def poisoned(allocate: Any, *args: Any, **named: Any) -> Any:
        tensor = allocate(*args, **named)
        is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if is_plain and tensor.element_size() > 1:
            floats = tensor.is_floating_point() or tensor.is_complex()
            words = torch.tensor([], dtype=torch.int16).set_(tensor.untyped_storage())
            words.fill_(FLOATS if floats else INTEGERS)
        return tensor

    return undo_all([replace(owner, name, poisoned) for owner, name in ALLOCATIONS])
