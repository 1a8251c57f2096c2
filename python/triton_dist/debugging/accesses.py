"""Report loads, stores and atomics of interpreted kernels to the checks.

:func:`watch` patches the interpreter's memory operations. Without checks, nothing is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import torch

Undo = Callable[[], None]


@dataclass(frozen=True)
class Access:
    """One operation of a program on memory.

    Attributes:
        operation: ``"load"``, ``"store"`` or ``"atomic"``.
        addresses: uint64 array of any shape with the addresses of the elements.
        mask: bool array, broadcastable to ``addresses``, which is True for the accessed elements;
            ``None``: all elements are accessed.
        element_type: Triton's type of an element.
        semantic: ``"acquire"``, ``"release"``, ``"acquire_release"`` or ``"relaxed"`` for an
            atomic; ``"volatile"`` or "" for a load.
        by_tma: whether this is a store through a descriptor, which is asynchronous on a GPU.
    """

    operation: str
    addresses: Any
    mask: Any
    element_type: Any
    semantic: str = ""
    by_tma: bool = False

    @property
    def itemsize(self) -> int:
        return max(1, int(self.element_type.primitive_bitwidth) // 8)

    def accessed_addresses(self) -> Any:
        """Return the accessed addresses as a one-dimensional array."""
        if self.mask is None:
            return np.ravel(self.addresses)
        return self.addresses[np.broadcast_to(self.mask, self.addresses.shape)]


class Observer:
    """Base class of checks. ``before`` runs before an access, and may raise to prevent the access.
    ``after`` runs after the access and receives the loaded values."""

    def before(self, access: Access) -> None:
        pass

    def after(self, access: Access, values: Any) -> None:
        pass


def patch(owner: Any, name: str, call: Callable[..., Any]) -> Undo:
    """Replace ``owner.name`` by a function that passes the original and its own arguments to
    ``call``. Return a function that restores the original."""
    original = getattr(owner, name)

    @wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, replaced)
    return lambda: setattr(owner, name, original)


ALLOCATIONS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided")),
)


def undo_all(undos: Sequence[Undo]) -> Undo:
    """Return a function that calls ``undos`` in reverse order."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo


def watch(upstream: Any, observers: Sequence[Observer]) -> Undo:
    """Report all memory operations to ``observers``. Return a function that ends this."""
    builder = upstream.InterpreterBuilder

    def observed(access: Access, operate: Callable[[], Any]) -> Any:
        for observer in observers:
            observer.before(access)
        result = operate()
        for observer in observers:
            observer.after(access, getattr(result, "data", None))
        return result

    def load(original: Any, self: Any, ptrs: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        semantic = "volatile" if kwargs.get("is_volatile", rest[-1] if rest else False) else ""
        access = Access("load", ptrs.data, _array(mask), ptrs.get_element_ty(), semantic)
        return observed(access, lambda: original(self, ptrs, mask, *rest, **kwargs))

    def store(
        original: Any, self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any
    ) -> Any:
        access = Access("store", ptrs.data, _array(mask), ptrs.get_element_ty())
        return observed(access, lambda: original(self, ptrs, value, mask, *rest, **kwargs))

    def modify(
        original: Any, self: Any, op: Any, ptr: Any, value: Any, mask: Any, *rest: Any
    ) -> Any:
        element_type, semantic = ptr.get_element_ty(), rest[0].name.lower()
        access = Access("atomic", ptr.data, _array(mask), element_type, semantic)
        return observed(access, lambda: original(self, op, ptr, value, mask, *rest))

    def exchange(original: Any, self: Any, ptr: Any, *rest: Any) -> Any:
        element_type, semantic = ptr.get_element_ty(), rest[2].name.lower()
        access = Access("atomic", ptr.data, None, element_type, semantic)
        return observed(access, lambda: original(self, ptr, *rest))

    def descriptor_operation(operation: str, indices_position: int) -> Callable[..., Any]:
        """Return a replacement for an operation through a tensor descriptor. ``indices_position``
        is the position of the block's indices in the arguments."""

        def copy(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
            desc = args[1] if operation == "atomic" else args[0]
            try:
                pointers, mask = desc.materialize_pointers(args[indices_position])
            except AssertionError:  # misaligned: the operation itself raises an error
                return original(self, *args, **kwargs)
            mask, unused = _array(mask), _unused_rows(desc, args[indices_position])
            if unused is None:
                element_type, by_tma = pointers.get_element_ty(), operation == "store"
                access = Access(operation, pointers.data, mask, element_type, by_tma=by_tma)
                return observed(access, lambda: original(self, *args, **kwargs))
            access = Access(operation, pointers.data, mask & ~unused, pointers.get_element_ty())
            result = observed(access, lambda: original(self, *args, **kwargs))
            unused_elements = np.broadcast_to(unused, result.data.shape)
            fill_with_poison(result.data, access.element_type, unused_elements)
            return result

        return copy

    undos = [
        patch(builder, "create_masked_load", load),
        patch(builder, "create_masked_store", store),
        patch(builder, "create_atomic_rmw", modify),
        patch(builder, "create_atomic_cas", exchange),
        patch(builder, "create_descriptor_load", descriptor_operation("load", 1)),
        patch(builder, "create_descriptor_store", descriptor_operation("store", 2)),
        patch(builder, "create_descriptor_reduce", descriptor_operation("atomic", 3)),
    ]
    return undo_all(undos)


def _unused_rows(desc: Any, indices: Sequence[Any]) -> Any:
    """Return a bool array that is True for the rows of the block that ``dl.only_rows`` excludes, or
    ``None`` if all rows are used."""
    begin, end = getattr(desc, "rows", (0, 0))
    row = int(indices[0].data.item()) + np.arange(desc.block_shape[0])
    unused = (row < begin) | (row >= end)
    if begin == end or not unused.any():
        return None
    return unused.reshape(-1, *(1,) * (len(desc.block_shape) - 1))


def _array(mask: Any) -> Any:
    """Return a mask as an array. The interpreter of Triton 3.9 and later passes a handle."""
    return mask if mask is None or isinstance(mask, np.ndarray) else mask.data


POISON_FLOAT, POISON_INTEGER = 0x7FFB, 0x7BFB
"""Poison: values of uninitialised two-byte words. ``POISON_FLOAT`` is NaN in all float types."""


def poison_pattern(dtype: Any, is_float: bool) -> Any:
    """Return the poison value as an element of the numpy ``dtype``, of at least 2 bytes."""
    word = POISON_FLOAT if is_float else POISON_INTEGER
    return np.frombuffer(word.to_bytes(2, "little") * (dtype.itemsize // 2), dtype)[0]


def fill_with_poison(block: Any, element_type: Any, where: Any) -> None:
    """Fill ``block[where]`` with poison, except for one-byte types (``element_type``)."""
    if block.itemsize > 1:
        bits = block.view(np.dtype(f"u{block.itemsize}"))
        bits[where] = poison_pattern(bits.dtype, element_type.is_floating())
