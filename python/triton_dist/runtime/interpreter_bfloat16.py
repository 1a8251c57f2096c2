"""bf16 arithmetic for Triton's interpreter, which holds a bf16 block as its bit patterns in
``uint16``.

Each operation widens its operands to fp32, works there and rounds once to nearest even, which is
what hardware does for a single operation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

NAN_BITS = np.uint16(0x7FC0)


def to_float32(bits: Any) -> Any:
    """The fp32 values, exact, of the bf16 bit patterns in an array of ``uint16``."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def from_float32(values: Any) -> Any:
    """The bf16 bit patterns, ``uint16``, nearest to an array of fp32; ties go to even, NaN stays
    NaN."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), NAN_BITS, rounded)


def is_bfloat16(handle: Any) -> bool:
    return bool(handle.dtype.scalar.name == "bf16")


def apply(upstream: Any) -> None:
    """Put these operations in place of those of ``upstream``, the module
    ``triton.runtime.interpreter``."""
    Handle, builder = upstream.TensorHandle, upstream.InterpreterBuilder
    binary_op, unary_op, ternary_op = builder.binary_op, builder.unary_op, builder.ternary_op
    cast_impl, fp_to_fp, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot
    fma, print_values = builder.create_fma, builder.create_print

    def widen(handle: Any) -> Any:
        return Handle(to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle

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
        if op is np.where or not is_bfloat16(other):  # a selection moves bits, whatever they mean
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
        if (to_bf16 or from_bf16) and src.dtype.scalar.primitive_bitwidth > 8:
            return cast(self, src, dst_type)
        return fp_to_fp(self, src, dst_type, rounding)

    def matmul(self: Any, a: Any, b: Any, d: Any, *options: Any, **options_by_name: Any) -> Any:
        return dot(self, widen(a), widen(b), d, *options, **options_by_name)

    def constant(self: Any, value: float) -> Any:
        return narrow(Handle(np.array([value], dtype=np.float32), tl.float32))

    def show(self: Any, prefix: Any, hex: Any, values: Any, *signs: Any) -> None:
        print_values(
            self, prefix, hex, values if hex else [widen(value) for value in values], *signs
        )

    builder.binary_op, builder.unary_op, builder.ternary_op = binary, unary, ternary
    builder.create_fma, builder.cast_impl, builder.create_fp_to_fp = (
        fused_multiply_add,
        cast,
        cast_float,
    )
    builder.create_dot, builder.get_bf16, builder.create_print = matmul, constant, show
