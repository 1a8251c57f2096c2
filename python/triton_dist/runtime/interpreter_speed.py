"""Make Triton's interpreter faster: cache objects and skip repeated checks.

Triton ("upstream") creates type and shape objects for each value of a kernel, which takes half of
the time of a matmul (Triton 3.9, CPU). These objects depend only on types and shapes, so sharing
them does not change results.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic

from triton_dist.runtime.interpreter_operators import Operators


def install(upstream: Any) -> None:
    """Patch the interpreter; ``upstream`` is the module ``triton.runtime.interpreter``."""
    share_shapes()
    share_block_types(upstream)
    cache_dtypes(upstream)
    skip_needless_casts()
    unwrap_by_type()
    call_builtins_directly(upstream)


def share_shapes() -> None:
    """Share immutable shape and size objects among tensors of equal shape."""
    shared: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def shape_of(type: Any) -> tuple[Any, Any, Any]:
        sizes = type.shape if type.is_block() else ()
        shape = tuple(getattr(size, "value", size) for size in sizes)
        numel_and_shape = shared.get(shape)
        if numel_and_shape is None:
            constants = tl.tuple([tl.constexpr(size) for size in shape])
            numel_and_shape = shared[shape] = tl.constexpr(math.prod(shape)), constants
        type.tensor_attributes = type.scalar, *numel_and_shape
        return type.tensor_attributes  # type: ignore[no-any-return]

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        try:
            self.dtype, self.numel, self.shape = type.tensor_attributes
        except AttributeError:
            self.dtype, self.numel, self.shape = shape_of(type)

    tl.tensor.__init__ = init


def cache_dtypes(upstream: Any) -> None:
    """Cache the numpy dtype of each Triton type. Upstream builds the table at each lookup."""
    original = upstream._get_np_dtype
    known: dict[str, np.dtype[Any]] = {}

    def np_dtype(tt_dtype: Any) -> np.dtype[Any]:
        if isinstance(tt_dtype, tl.block_type):
            tt_dtype = tt_dtype.element_ty
        if isinstance(tt_dtype, tl.pointer_type):
            return np.dtype(np.uint64)
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = original(tt_dtype)
        return found

    upstream._get_np_dtype = np_dtype


def share_block_types(upstream: Any) -> None:
    """Share immutable block types of equal shape and element type. Upstream creates a block type
    for each value, and again when the value is passed to the builder. A block type that is created
    explicitly copies the attributes of an equal shared type."""
    shared: dict[tuple[Any, ...], Any] = {}
    original = tl.block_type.__init__

    def key_of(element_ty: Any, shape: Any) -> tuple[Any, ...]:
        # A pointer type is not hashable; its name contains everything but the address space.
        return element_ty.name, getattr(element_ty, "address_space", 0), *shape

    def block(element_ty: Any, shape: Any) -> Any:
        key = key_of(element_ty, shape)
        found = shared.get(key)
        if found is None:
            found = shared[key] = tl.block_type(element_ty, shape)
        return found

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        known = None
        if type(shape) is list and all(type(size) is int for size in shape):
            known = shared.get(key_of(element_ty, shape))
        if known is None:
            original(self, element_ty, shape)
        else:
            vars(self).update(vars(known))

    tl.block_type.__init__ = init
    tl.block_type.with_element_ty = lambda self, scalar_ty: block(scalar_ty, self.shape)
    upstream.InterpreterBuilder.get_block_ty = lambda self, dtype, shape: block(dtype, shape)


def skip_needless_casts() -> None:
    """Skip conversions of operands that already have the required type."""
    check, cast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.cast
    tensor, plain = tl.tensor, {"int32", "int64", "fp32"}

    def checked(self: Any, lhs: Any, rhs: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
        if type(lhs) is tensor and type(rhs) is tensor and lhs.dtype is rhs.dtype:  # noqa: SIM102
            if lhs.dtype.name in plain:
                return self.broadcast_impl_value(lhs, rhs)  # type: ignore[no-any-return]
        return check(self, lhs, rhs, *rest, **options)  # type: ignore[no-any-return]

    def converted(self: Any, input: Any, dst_ty: Any, *rounding: Any, **options: Any) -> Any:
        if input.dtype is dst_ty:
            return input
        return cast(self, input, dst_ty, *rounding, **options)

    TritonSemantic.binary_op_type_checking_impl = checked
    TritonSemantic.cast = converted


def unwrap_by_type() -> None:
    """Return values of common types immediately, without checking whether they are constexpr."""
    original, constexpr = core._unwrap_if_constexpr, tl.constexpr
    plain = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, bool, float, str, type(None)}

    def unwrap(o: Any) -> Any:
        cls = type(o)
        if cls in plain:
            return o
        return o.value if cls is constexpr else original(o)

    core._unwrap_if_constexpr = unwrap


def call_builtins_directly(upstream: Any) -> None:
    """Collect the builtin functions of a module such as ``triton.language`` once, instead of at
    each launch. Kernels then call the functions that the builtins wrap."""
    builtins: dict[Any, list[tuple[str, Any, Callable[..., Any]]]] = {}
    semantic = TritonSemantic(upstream.interpreter_builder)
    operators = Operators(upstream, semantic)

    def direct_builtin(member: Any) -> Callable[..., Any]:
        function = inspect.unwrap(member, stop=lambda each: not core.is_builtin(each))

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def fast_builtin(package: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return operators.operator_for(name, call) if package is tl.tensor else call

    def patch(package: Any, _builder: Any, scope: Any) -> None:
        if package not in builtins:
            builtins[package] = [
                (name, member, fast_builtin(package, name, direct_builtin(member)))
                for name, member in inspect.getmembers(package)
                if core.is_builtin(member)
            ]
        for name, member, call in builtins[package]:
            if getattr(package, name) is member:  # not patched by an enclosing launch
                scope.set_attr(package, name, call)

    upstream._patch_builtin = patch
