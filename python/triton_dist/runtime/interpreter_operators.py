"""Operators for Triton's interpreter: faster for common types, and correct for bf16 and fp8.

In Triton ("upstream"), ``a + b`` of two ``int32`` blocks passes through a dozen functions for type
checks, conversions without effect and wrapper objects, around one numpy operation. Most operations
of a kernel are integer operations on rows, columns, offsets and flags. :class:`Operators` calls
numpy directly for common types, and upstream for other types.

The interpreter stores a bf16 block as bit patterns in ``uint16``. Each bf16 operation here widens
its operands to fp32 and rounds the result once to nearest even, like hardware. fp8 blocks are bit
patterns in ``uint8``, which ``tl.dot`` widens to fp32 by a table. Upstream reads the NaN of e4m3 as
480, flushes subnormals of e5m2 to zero, and loses carries when it rounds to fp8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir

NAN_BITS = np.uint16(0x7FC0)
_ALL_BYTES = torch.arange(256, dtype=torch.uint8)
_TORCH_FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_FLOAT8 = {name: _ALL_BYTES.view(dtype).float().numpy() for name, dtype in _TORCH_FLOAT8.items()}
"""fp32 values of the bit patterns, by Triton's name of the type."""
for _values in _FLOAT8.values():
    _values[np.isnan(_values)] = np.nan  # a signalling NaN would make numpy warn


def to_float32(bits: Any) -> Any:
    """Return the exact fp32 values of the bf16 bit patterns in a ``uint16`` array."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float32(values: Any) -> Any:
    """Round fp32 values to bf16 bit patterns (``uint16``). Ties round to even, NaN stays NaN."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), NAN_BITS, rounded)


def is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar.name == "bf16")


def use_float32_for_bfloat16(upstream: Any) -> None:
    """Replace the bf16 operations of ``upstream``, the module ``triton.runtime.interpreter``."""
    Handle, builder = upstream.TensorHandle, upstream.InterpreterBuilder
    binary_op, unary_op, ternary_op = builder.binary_op, builder.unary_op, builder.ternary_op
    cast_impl, fp_to_fp, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot
    fma, print_values = builder.create_fma, builder.create_print

    def widen(handle: Any) -> Any:
        return Handle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle

    def widen_float8(handle: Any) -> Any:
        values = _FLOAT8.get(handle.dtype.scalar.name)
        return widen(handle) if values is None else Handle(values[handle.data], tl.float32)

    def narrow(handle: Any) -> Any:
        return Handle(from_float32(handle.data), tl.bfloat16)

    def binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if not is_bfloat16(lhs):
            return binary_op(self, lhs, rhs, op)
        result = binary_op(self, widen(lhs), widen(rhs), op)
        if result.data.dtype == np.bool_:  # a comparison
            return Handle(result.data, tl.int1)
        return narrow(result)

    def unary(self: Any, arg: Any, op: Any) -> Any:
        return (
            narrow(unary_op(self, widen(arg), op)) if is_bfloat16(arg) else unary_op(self, arg, op)
        )

    def ternary(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_bfloat16(other):  # ``where`` copies bits of any type
            return ternary_op(self, lhs, rhs, other, op)
        return narrow(ternary_op(self, widen(lhs), widen(rhs), widen(other), op))

    def fused_multiply_add(self: Any, x: Any, y: Any, z: Any) -> Any:
        result = fma(self, widen(x), widen(y), widen(z))
        return narrow(result) if is_bfloat16(z) else result

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar.name == "bf16":
            return src if is_bfloat16(src) else narrow(cast_impl(self, src, tl.float32))
        return cast_impl(self, widen(src), dst_type)

    def cast_float(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        to_bf16 = dst_type.scalar.name == "bf16" and rounding == ir.ROUNDING_MODE.RTNE
        from_bf16 = is_bfloat16(src) and dst_type.scalar.primitive_bitwidth > 8
        float8 = _TORCH_FLOAT8.get(dst_type.scalar.name)
        if float8 is not None and rounding == ir.ROUNDING_MODE.RTNE:
            wide = torch.from_numpy(widen(src).data.astype(np.float32))
            largest = torch.finfo(float8).max  # GPUs saturate instead of overflowing
            return Handle(
                wide.clamp(-largest, largest).to(float8).view(torch.uint8).numpy(), dst_type.scalar
            )
        if (to_bf16 or from_bf16) and src.dtype.scalar.primitive_bitwidth > 8:
            return cast(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding)

    def matmul(self: Any, a: Any, b: Any, d: Any, *options: Any, **options_by_name: Any) -> Any:
        return dot(self, widen_float8(a), widen_float8(b), d, *options, **options_by_name)

    def constant(self: Any, value: float) -> Any:
        return narrow(Handle(np.array([value], dtype=np.float32), tl.float32))

    def show(self: Any, prefix: Any, hex: Any, values: Any, *signs: Any) -> None:
        print_values(self, prefix, hex, values if hex else list(map(widen, values)), *signs)

    builder.binary_op, builder.unary_op, builder.ternary_op = binary, unary, ternary
    builder.create_fma, builder.cast_impl, builder.create_fp_to_fp = (
        fused_multiply_add,
        cast,
        cast_float,
    )
    builder.create_dot, builder.get_bf16, builder.create_print = matmul, constant, show


Operator = Callable[[Any, Any], Any]
_DtypeByName = dict[str, "np.dtype[Any]"]

_INTEGERS: _DtypeByName = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
_FLOAT32_ONLY: _DtypeByName = {"fp32": np.dtype(np.float32)}
_NUMBERS: _DtypeByName = {**_INTEGERS, **_FLOAT32_ONLY, "fp16": np.dtype(np.float16)}
_BITWISE: _DtypeByName = {**_INTEGERS, "int1": np.dtype(np.bool_)}


def _quotient(left: Any, right: Any) -> Any:
    """Divide and round towards zero, like upstream."""
    return (left - np.fmod(left, right)) // right


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_SHIFTS: dict[str, Callable[..., Any]] = {"lshift": np.left_shift, "rshift": np.right_shift}
_OPERATIONS: dict[str, tuple[Callable[..., Any], _DtypeByName]] = {
    "add": (np.add, _NUMBERS),
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "truediv": (np.divide, _FLOAT32_ONLY),
    "floordiv": (_quotient, _INTEGERS),
    "mod": (np.fmod, _INTEGERS),
    "and": (np.bitwise_and, _BITWISE),
    "or": (np.bitwise_or, _BITWISE),
    **{name: (operation, _INTEGERS) for name, operation in _SHIFTS.items()},
    **{name: (operation, _NUMBERS) for name, operation in _COMPARISONS.items()},
}
"""By operator name: a numpy function, and the operand types for which upstream's result equals the
function's result (numpy dtypes by Triton's name of the type)."""

_MAX_CONSTANTS = 4096  # cached constants of a kernel
_FLOAT32 = np.finfo(np.float32)


class Operators:
    """Fast versions of the operators of ``upstream``, the module ``triton.runtime.interpreter``."""

    def __init__(self, upstream: Any, semantic: Any) -> None:
        self._semantic = semantic
        self._handle = upstream.TensorHandle
        self._constants: dict[tuple[str, Any], Any] = {}
        self._result_types: dict[tuple[str, str], Any] = {}

    def operator_for(self, method: str, slow: Operator) -> Operator:
        """Return a fast ``tl.tensor.<method>``, or upstream's method ``slow`` if there is none."""
        name = method.strip("_") if method.startswith("__") else ""
        if name == "add":
            slow = self._pointer_add(slow)
        if name in _OPERATIONS:
            return self._fast_operator(name, slow)
        if name[:1] == "r" and name[1:] in _OPERATIONS and name[1:] not in _SHIFTS:
            return self._fast_operator(name[1:], slow, is_reflected=True)
        return slow

    def _fast_operator(self, name: str, slow: Operator, is_reflected: bool = False) -> Operator:
        """Return the operator ``name``, which calls ``slow`` for types without a fast version."""
        operation, dtypes = _OPERATIONS[name]
        if is_reflected:  # ``number - tensor``: the tensor is the right operand
            operation = _swapped(operation)
        compares, tensor, int1, wrap = name in _COMPARISONS, tl.tensor, tl.int1, self._wrap
        constant = self._shift_count if name in _SHIFTS else self._constant
        result_type = self._result_type

        def call(self: Any, other: Any) -> Any:
            dtype, left, tensor_type = self.dtype, self.handle, self.type
            numbers, result_dtype = left.data, left.dtype
            if numbers.dtype is not dtypes.get(dtype.name):
                return slow(self, other)
            if type(other) is tensor:
                others = other.handle.data
                if others.dtype is not dtypes.get(other.dtype.name):
                    return slow(self, other)
                if other.type is not tensor_type:
                    tensor_type = result_type(tensor_type, other.type)
                    if tensor_type is None:
                        return slow(self, other)
                    if tensor_type.scalar is not dtype:
                        result_dtype = tensor_type.scalar
            else:
                others = constant(other, dtype)
                if others is None:
                    return slow(self, other)
            if compares:
                tensor_type = tensor_type.with_element_ty(int1) if tensor_type.is_block() else int1
            return wrap(operation(numbers, others), result_dtype, tensor_type)

        return call

    def _pointer_add(self, slow: Operator) -> Operator:
        """Return an operator that adds offsets to pointers, and calls ``slow`` for other types."""
        tensor, pointer, int32 = tl.tensor, tl.pointer_type, tl.int32
        wrap, constant = self._wrap, self._constant

        def call(self: Any, other: Any) -> Any:
            dtype, tensor_type = self.dtype, self.type
            if type(dtype) is not pointer:
                return slow(self, other)
            if type(other) is tensor:
                offsets, others = other.handle.data, other.type
                if offsets.dtype is not _INTEGERS.get(other.dtype.name):
                    return slow(self, other)
                if others.is_block():
                    if not tensor_type.is_block():
                        tensor_type = others.with_element_ty(dtype)
                    elif tensor_type.shape.values != others.shape.values:
                        return slow(self, other)
            else:
                offsets = constant(other, int32)
                if offsets is None:
                    return slow(self, other)
            size = max(1, dtype.element_ty.primitive_bitwidth // 8)
            addresses = self.handle.data + size * offsets.astype(np.uint64)
            return wrap(addresses, self.handle.dtype, tensor_type)

        return call

    def _wrap(self, data: Any, dtype: Any, tensor_type: Any) -> Any:
        """Return a ``tl.tensor`` of type ``tensor_type`` with the numpy array ``data``, whose
        elements have the Triton type ``dtype``."""
        handle = object.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        return tl.tensor(handle, tensor_type)

    def _constant(self, value: Any, dtype: Any) -> Any:
        """Return ``value`` as an array of type ``dtype``, or None if upstream must choose."""
        if type(value) is tl.constexpr:
            value = value.value
        if type(value) is int:
            if dtype.name not in _INTEGERS:
                return None
        elif type(value) is not float or dtype.name != "fp32":
            return None
        array = self._constants.get((dtype.name, value))
        if array is None and _is_32_bit(value):
            if len(self._constants) >= _MAX_CONSTANTS:
                self._constants.clear()
            array = self._semantic.scalar_constant(value, dtype).handle.data
            self._constants[dtype.name, value] = array
        return array

    def _shift_count(self, value: Any, dtype: Any) -> Any:
        """Return a shift distance as an array, or None if upstream must check the distance."""
        bits = value.value if type(value) is tl.constexpr else value
        return self._constant(value, dtype) if type(bits) is int and 0 <= bits < 32 else None

    def _result_type(self, left: Any, right: Any) -> Any:
        """Return the result type of an operation, or None if upstream must compute it: if the
        operands are invalid, differ in the number of dimensions, or are promoted, except int32 to
        int64."""
        key = left.name, right.name
        if key not in self._result_types:
            self._result_types[key] = _broadcast(left, right)
        return self._result_types[key]


def _swapped(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda left, right: operation(right, left)


def _is_32_bit(value: Any) -> bool:
    """Return whether upstream represents a number as int32 or float32."""
    if type(value) is int:
        return -(2**31) <= value < 2**31
    return value == 0.0 or bool(_FLOAT32.tiny <= abs(value) <= _FLOAT32.max)


def _broadcast(left: Any, right: Any) -> Any:
    element, other = left.scalar, right.scalar
    if element.name != other.name:
        if element.name not in _INTEGERS or other.name not in _INTEGERS:
            return None
        element = tl.int64
    shapes = [tuple(each.shape) if each.is_block() else () for each in (left, right)]
    if not any(shapes):
        return element
    if all(shapes) and len(shapes[0]) != len(shapes[1]):
        return None
    try:
        return tl.block_type(element, list(np.broadcast_shapes(*shapes)))
    except ValueError:
        return None
