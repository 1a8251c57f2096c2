"""Memory accesses through tensor descriptors in Triton's interpreter, as strided numpy views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from triton_dist.runtime.interpreter_operators import NAN_BITS


class _Memory:
    """Adapter with which ``np.asarray`` returns a view of the memory at an address."""

    def __init__(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any
    ) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": dtype.str,
            "version": 3,
        }


def _view(desc: Any, indices: Sequence[Any], dtype: Any) -> tuple[Any, tuple[slice, ...]]:
    """Return a view of the elements of the block at ``indices`` that lie within the tensor, and the
    slices of the block that they fill. Raise ``ValueError`` if the block's offset in the last
    dimension is not a multiple of 16 bytes, which TMA requires."""
    address, shape, strides, block_slices = desc.base.data.item(), [], [], []
    start = 0
    for index, size, stride, block in zip(
        indices, desc.shape, desc.strides, desc.block_shape, strict=True
    ):
        start, step = index.data.item(), stride.data.item() * dtype.itemsize
        low = max(start, 0)
        high = max(min(start + block, size.data.item()), low)
        address += low * step
        shape.append(high - low)
        strides.append(step)
        block_slices.append(slice(low - start, high - start))
    if start * dtype.itemsize % 16:
        raise ValueError(
            f"a descriptor's block starts at element {start} of its last dimension, "
            f"{start * dtype.itemsize} bytes, which is not a multiple of 16 bytes"
        )
    return np.asarray(_Memory(address, tuple(shape), tuple(strides), dtype)), tuple(block_slices)


def apply_copy(upstream: Any) -> None:
    """Load and store blocks as copies of views. ``upstream`` is ``triton.runtime.interpreter``."""
    builder = upstream.InterpreterBuilder
    load_by_pointers = builder.create_descriptor_load

    def load(
        self: Any, desc: Any, indices: Sequence[Any], *cache: Any, **cache_by_name: Any
    ) -> Any:
        if getattr(desc, "round_f32_to_tf32", False):
            return load_by_pointers(self, desc, indices, *cache, **cache_by_name)
        element = desc.base.get_element_ty()
        view, block_slices = _view(desc, indices, upstream._get_np_dtype(element))
        if view.shape == tuple(desc.block_shape):
            return upstream.TensorHandle(view.copy(), element)
        block = np.zeros(desc.block_shape, dtype=view.dtype)
        if desc.padding == ir.PADDING_OPTION.PAD_NAN:
            block[...] = NAN_BITS if element == tl.bfloat16 else np.nan
        block[block_slices] = view
        return upstream.TensorHandle(block, element)

    def store(self: Any, desc: Any, value: Any, indices: Sequence[Any]) -> None:
        view, block_slices = _view(
            desc, indices, upstream._get_np_dtype(desc.base.get_element_ty())
        )
        view[...] = value.data[block_slices]

    builder.create_descriptor_load = load
    builder.create_descriptor_store = store


def apply_reduce(upstream: Any) -> None:
    """Add ``create_descriptor_reduce`` to the builder of ``upstream``, which is
    ``triton.runtime.interpreter``. ``desc.atomic_add`` and similar calls use it."""
    ops, kinds = ir.ATOMIC_OP, ir.DESCRIPTOR_REDUCE_KIND
    signed = {
        kinds.ADD: ops.ADD,
        kinds.MIN: ops.MIN,
        kinds.MAX: ops.MAX,
        kinds.AND: ops.AND,
        kinds.OR: ops.OR,
        kinds.XOR: ops.XOR,
    }
    unsigned = {**signed, kinds.MIN: ops.UMIN, kinds.MAX: ops.UMAX}
    Handle = upstream.TensorHandle

    def reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Sequence[Any]) -> None:
        element = desc.base.get_element_ty()
        if element == tl.bfloat16:  # ``kind`` is ADD. Not atomic, but one program runs at a time.
            view, block_slices = _view(desc, indices, upstream._get_np_dtype(element))
            part = Handle(value.data[block_slices], element)
            view[...] = self.binary_op(Handle(view, element), part, np.add).data
            return
        if element.is_floating():
            op = ops.FADD
        else:
            op = (unsigned if element.is_int_unsigned() else signed)[kind]
        pointers, mask = desc.materialize_pointers(indices)
        if not isinstance(mask, Handle):  # an array before Triton 3.9
            mask = Handle(mask, tl.int1)
        self.create_atomic_rmw(
            op, pointers, value, mask, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.SYSTEM
        )

    upstream.InterpreterBuilder.create_descriptor_reduce = reduce
