"""Kernel functions that store values during a launch, for inspection after the launch.

    @runner.jit
    def kernel(x_ptr, n, BLOCK: tl.constexpr):
        ...
        language.dump(x, grid=(3, 0))

    kernel[grid](x, n, BLOCK=64, dump_tensor=torch.empty(64, device="cuda"))

A launch with ``dump_tensor`` compiles the kernel with an additional argument. In other launches the
functions generate no code. Call them in the kernel itself, not in functions that it calls.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.core import TRITON_BUILTIN

from triton_dist.errors import InvalidArgument

DUMP_KEYWORD = "dump_tensor"
"""Name of the launch keyword and of the hidden kernel argument."""

__all__ = ["dump", "dump_boundary", "dump_grids"]

_interpreted_dump_tensors: list[Any] = []
"""``dump_tensor`` of the launch that is being interpreted."""


@triton.jit
def _store(pointer, value, offset):
    if value.type.is_block():
        index = tl.reshape(tl.arange(0, value.numel), value.shape)
        tl.store(pointer + offset + index, value)
    else:
        tl.store(pointer + offset, value)


@triton.jit
def _dump(pointer, value, offset, x, y, z):
    if (tl.program_id(0) == x) & (tl.program_id(1) == y) & (tl.program_id(2) == z):
        _store(pointer, value, offset)


@triton.jit
def _dump_boundary(pointer, value, offset):
    x, y, z = tl.num_programs(0) - 1, tl.num_programs(1) - 1, tl.num_programs(2) - 1
    _dump(pointer, value, offset, x, y, z)


@triton.jit
def _dump_grids(pointer, value, offset):
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    program = program * tl.num_programs(2) + tl.program_id(2)
    _store(pointer, value, offset + program * value.numel)


def _register_builtin(function: Callable[..., None]) -> Callable[..., None]:
    """Register ``function`` as a Triton builtin, which runs when a call of it is compiled."""
    setattr(function, TRITON_BUILTIN, True)
    return function


@_register_builtin
def dump(value: Any, offset: Any = 0, grid: Any = 0, _generator: Any = None) -> None:
    """Store ``value`` in row-major order to ``dump_tensor``, starting at element ``offset``.

    Args:
        value: a block or a scalar.
        offset: first element of ``dump_tensor`` to write.
        grid: ids of the program that stores, one to three numbers; default: the first program.

    Raises:
        InvalidArgument: at the launch, if a function called by the kernel calls ``dump``, or if
            ``grid`` has more than three numbers.
    """
    pointer = _pointer("dump", _generator)
    if pointer is not None:
        grid = grid.value if isinstance(grid, tl.constexpr) else grid
        programs = list(grid) if isinstance(grid, (tuple, list, tl.tuple)) else [grid]
        if len(programs) > 3:
            raise InvalidArgument("dump", "grid", programs, "at most three numbers")
        _call(_generator, _dump, pointer, value, offset, *programs, *[0] * (3 - len(programs)))


@_register_builtin
def dump_boundary(value: Any, offset: Any = 0, _generator: Any = None) -> None:
    """Store ``value`` like :func:`dump`, in the last program of the grid."""
    pointer = _pointer("dump_boundary", _generator)
    if pointer is not None:
        _call(_generator, _dump_boundary, pointer, value, offset)


@_register_builtin
def dump_grids(value: Any, offset: Any = 0, _generator: Any = None) -> None:
    """Store ``value`` of all programs, one after another; the last grid axis varies fastest."""
    pointer = _pointer("dump_grids", _generator)
    if pointer is not None:
        _call(_generator, _dump_grids, pointer, value, offset)


def _pointer(function: str, generator: Any) -> Any:
    """Return ``dump_tensor`` of the kernel that is being compiled or interpreted, or ``None``."""
    if generator is None:
        return _interpreted_dump_tensors[-1] if _interpreted_dump_tensors else None
    if not generator.is_kernel:
        expected = "the kernel itself: a function that it calls does not have dump_tensor"
        raise InvalidArgument(function, "caller", "a function of the kernel", expected)
    return generator.lscope.get(DUMP_KEYWORD)


def _call(generator: Any, function: Any, *args: Any) -> None:
    if generator is None:
        function(*args)
        return
    known = [
        arg if isinstance(arg, (tl.tensor, tl.constexpr)) else tl.constexpr(arg) for arg in args
    ]
    generator.call_JitFunction(function, known, {})


def jit_options(kernel: Any) -> dict[str, Any]:
    """Return the options with which ``triton.jit`` created ``kernel``."""
    names = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")
    options = {name: getattr(kernel, name) for name in (*names, "launch_metadata")}
    return options | {"repr": kernel._repr}


class KernelWithDump(triton.JITFunction):
    """A kernel with the additional last argument ``dump_tensor``."""

    def __init__(self, kernel: Any) -> None:
        fn = kernel.fn
        copy = types.FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
        )
        copy.__dict__.update(fn.__dict__)
        copy.__module__, copy.__qualname__, copy.__doc__ = (
            fn.__module__, fn.__qualname__, fn.__doc__,
        )  # fmt: skip
        copy.__signature__ = _signature(fn)  # type: ignore[attr-defined]
        super().__init__(copy, **jit_options(kernel))

    def parse(self) -> ast.Module:
        """Return the syntax tree of the kernel with the additional argument."""
        tree: ast.Module = super().parse()
        (function,) = tree.body
        assert isinstance(function, ast.FunctionDef)
        function.args.args.append(ast.arg(DUMP_KEYWORD))
        function.args.defaults.append(ast.Constant(None))
        return ast.fix_missing_locations(tree)


def with_dump_argument(fn: Callable[..., None]) -> Callable[..., None]:
    """Add ``dump_tensor`` to ``fn``, a kernel that will be interpreted."""

    @functools.wraps(fn)
    def kernel(*args: Any, dump_tensor: Any, **kwargs: Any) -> None:
        _interpreted_dump_tensors.append(dump_tensor)
        try:
            fn(*args, **kwargs)
        finally:
            _interpreted_dump_tensors.pop()

    kernel.__signature__ = _signature(fn)  # type: ignore[attr-defined]
    return kernel


def _signature(fn: Callable[..., None]) -> inspect.Signature:
    dump_tensor = inspect.Parameter(
        DUMP_KEYWORD, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None
    )
    return inspect.Signature([*inspect.signature(fn).parameters.values(), dump_tensor])
