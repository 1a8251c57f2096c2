"""Workarounds for Triton's interpreter, which runs the kernels of a rank without a GPU.

Each workaround is a function. Its decorator lists the Triton versions that need it, and its
docstring gives the reason. Triton's own implementation is called "upstream".
:func:`install` applies the entries of ``WORKAROUNDS`` that the installed Triton needs.
``triton_dist.jit`` calls :func:`install` when it decorates a kernel that will be interpreted.

A process is a rank. The interpreter patches ``triton.language`` and has one global builder, so
launches from several threads run one after another. A kernel that waits for a write of another
launch of its process therefore waits forever. A kernel may wait for programs of its own grid, for
other processes, and for copy threads, which launch no kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from packaging.specifiers import SpecifierSet
from triton.backends.compiler import GPUTarget
from triton.runtime import interpreter as upstream
from triton.runtime.errors import InterpreterError
from triton.tools.tensor_descriptor import TensorDescriptor

from triton_dist import knobs
from triton_dist.errors import TritonDistError
from triton_dist.runtime import interpreter_descriptors, interpreter_operators, interpreter_speed
from triton_dist.runtime.cooperative_grid import CooperativeGrid, pause
from triton_dist.runtime.triton_compat import HostDriver, check_versions, triton_version

__all__ = ["WORKAROUNDS", "Workaround", "install", "pause"]


@dataclasses.dataclass(frozen=True)
class Workaround:
    """A patch of the interpreter. ``versions`` specifies the Triton versions that need it."""

    name: str
    versions: str
    apply: Callable[[], None]

    @property
    def is_needed(self) -> bool:
        return triton_version() in SpecifierSet(self.versions)


WORKAROUNDS: list[Workaround] = []


def workaround(versions: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator that adds a function to ``WORKAROUNDS``, for ``versions`` such as ``">=3.6"``."""

    def add(apply: Callable[[], None]) -> Callable[[], None]:
        WORKAROUNDS.append(Workaround(apply.__name__, versions, apply))
        return apply

    return add


@functools.cache
def install() -> None:
    """Apply every workaround that the installed Triton needs, and make the interpreter faster. Runs
    once per process. To also turn on the checks of ``TRITON_DIST_DEBUG``, call
    :func:`triton_dist.debugging.modes.install_interpreter` instead."""
    check_versions()
    for entry in WORKAROUNDS:
        if entry.is_needed:
            entry.apply()
    interpreter_speed.install(upstream)


_launch_lock = threading.RLock()


def _replace_lock() -> None:
    """Replace the lock in a forked child, because a thread of the parent may have held it."""
    global _launch_lock
    _launch_lock = threading.RLock()


os.register_at_fork(after_in_child=_replace_lock)


class _LanguagePatches:
    """Language modules (such as ``triton.language``) that the running launch has patched."""

    def __init__(self) -> None:
        self._patched: set[ModuleType] = set()
        self._scopes: list[Any] = []

    def patch_for(self, fn: Callable[..., Any]) -> None:
        needed = _languages_of(fn)
        if not self._scopes or not needed <= self._patched:
            self._scopes.append(upstream._patch_lang(fn))
            self._patched |= needed

    def restore(self) -> None:
        while self._scopes:
            self._scopes.pop().restore()


_patches: _LanguagePatches | None = None
"""Patches of the running launch."""


@functools.cache
def _languages_of(fn: Callable[..., Any]) -> frozenset[ModuleType]:
    modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return frozenset(module for module in modules if module in (tl, tl.core))


@functools.cache
def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(fn)


def _is_on_host(arg: Any) -> bool:
    if isinstance(arg, tuple):
        return all(map(_is_on_host, arg))
    if isinstance(arg, TensorDescriptor):
        return _is_on_host(arg.base)
    return not hasattr(arg, "data_ptr") or (
        isinstance(arg, torch.Tensor) and arg.device.type == "cpu"
    )


def _launch(executor: Any, /, *args: Any, **kwargs: Any) -> None:
    """Run ``kernel[grid](*args, **kwargs)``. Replaces upstream's ``GridExecutor.__call__``."""
    global _patches
    signature = _signature(executor.fn)
    kwargs = {name: value for name, value in kwargs.items() if name in signature.parameters}
    with _launch_lock:
        # Use CPU tensors in place. Upstream would copy each storage onto itself after the launch.
        in_place = all(map(_is_on_host, args)) and all(map(_is_on_host, kwargs.values()))
        host_arguments = (args, kwargs) if in_place else executor._init_args_hst(args, kwargs)
        for hook in executor.pre_run_hooks:
            hook(*host_arguments[0], **host_arguments[1])
        outer, _patches = _patches, _LanguagePatches()
        try:
            _patches.patch_for(executor.fn)
            _run_grid(executor, signature, *host_arguments)
        finally:
            _patches.restore()
            _patches = outer
        if not in_place:
            executor._restore_args_dev(args, host_arguments[0], kwargs, host_arguments[1])


def _run_grid(executor: Any, signature: inspect.Signature, args: Any, kwargs: Any) -> None:
    builder = upstream.interpreter_builder
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    values = {
        name: value if name in executor.constexprs else upstream._implicit_cvt(value)
        for name, value in bound.arguments.items()
    }
    sizes = executor.grid(values) if callable(executor.grid) else executor.grid
    x, y, z = (*map(operator.index, sizes), 1, 1, 1)[: max(3, len(sizes))]

    def run_program(index: int) -> None:
        program = (index // (y * z), index // z % y, index % z)
        builder.grid_idx = program
        try:
            executor.fn(**values)
        except TritonDistError:
            raise
        except Exception as error:
            if triton.knobs.compilation.front_end_debugging:
                raise
            raise InterpreterError(f"program {program}: {error!r}") from error

    builder.set_grid_dim(x, y, z)
    CooperativeGrid(x * y * z, run_program, vars(builder), knobs.resident_programs.get()).run()


@workaround(">=3.6,<3.10")
def cooperative_grid() -> None:
    """Let a program of a grid wait for a later program of the grid. Upstream starts a program after
    the previous program has ended, so the wait would never end."""
    upstream.GridExecutor.__call__ = _launch


@workaround(">=3.6,<3.10")
def typed_errors() -> None:
    """Raise triton_dist's errors unchanged, and other exceptions as one ``InterpreterError``.

    At each level of calls in a kernel, upstream replaces an exception by an ``InterpreterError``
    with the exception's ``repr``. A caller could not distinguish ``WaitTimeout`` from a type error.

    This also patches ``triton.language`` only once per launch. Upstream patches it at each call of
    a device function, which takes a third of a descriptor matmul's time, and never restores it.
    """
    original = upstream.InterpretedFunction.__call__

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _patches is None:
            return original(self, *args, **kwargs)
        fn = self.rewrite()
        _patches.patch_for(fn)
        return fn(*args, **kwargs)

    upstream.InterpretedFunction.__call__ = call


@workaround("<3.7")
def runtime_range() -> None:
    """Support ``range(n)`` with a value ``n`` that is not constexpr. Upstream calls ``int`` on an
    array of one element, which numpy ≥ 2.4 rejects ("only 0-dimensional arrays can be converted").
    Fixed in Triton 3.7."""
    original = upstream._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    upstream._patch_lang_tensor = patch


@workaround("<3.8")
def bool_argument() -> None:
    """Store a Python ``bool`` argument in 8 bits. Upstream stores it in 32 bits under the type
    ``int1``, which raises "data itemsize exceeds". Fixed in Triton 3.8."""
    original = upstream._implicit_cvt

    def convert(arg: Any) -> Any:
        if isinstance(arg, bool):
            return tl.tensor(upstream.TensorHandle(np.array([arg]), tl.int1), tl.int1)
        return original(arg)

    upstream._implicit_cvt = convert


@workaround(">=3.6,<3.10")
def device_assert() -> None:
    """Enable ``tl.device_assert`` by ``debug=True``; upstream always uses ``debug=False``.
    ``debug=True`` alone would also check integer overflow. This check stays off, as in compiled
    kernels without debug mode, because it takes half of the time of an elementwise kernel."""
    builder = upstream.interpreter_builder
    builder.options = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)


@workaround(">=3.6,<3.10")
def bfloat16() -> None:
    """Compute bf16 in fp32.

    Upstream stores a bf16 block as bit patterns in ``uint16``. Most operations treat the patterns
    as integers: ``tl.dot`` is off by 1e9, ``+`` by 1e38, and comparisons of negative numbers are
    reversed. Casts from fp16 and integers have the same fault, and the cast from fp32 truncates
    instead of rounding.
    """
    interpreter_operators.use_float32_for_bfloat16(upstream)


@workaround(">=3.6,<3.10")
def descriptor_copy() -> None:
    """Copy blocks of tensor descriptors as strided views of memory. Upstream builds a pointer and a
    mask for each element, which takes a quarter of the time of a descriptor matmul. If a descriptor
    pads bf16 blocks with NaN, upstream pads with zeros, because it casts NaN to an integer."""
    interpreter_descriptors.apply_copy(upstream)


@workaround(">=3.6,<3.10")
def descriptor_reduce() -> None:
    """Add ``create_descriptor_reduce``, which ``desc.atomic_add`` and similar calls need. The
    reductions are atomic across processes, like the interpreter's own atomics. Reductions of fp16
    and bf16 are atomic within a process only."""
    interpreter_descriptors.apply_reduce(upstream)


class _InterpretingDriver(HostDriver):
    """Triton's active driver in a process without a GPU, for code that requests a driver."""

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def benchmark(
            kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), **_: Any
        ) -> list[float]:
            """Return ``quantiles`` of the times of three calls in ms, after an untimed call."""
            samples = []
            for _round in range(4):
                started = time.perf_counter()
                kernel_call()
                samples.append((time.perf_counter() - started) * 1e3)
            return [float(value) for value in np.quantile(samples[1:], quantiles)]

        return benchmark


@workaround(">=3.6,<3.10")
def autotune_without_gpu() -> None:
    """Set a driver that benchmarks by the wall clock, unless the process has set another driver.
    ``@triton.autotune`` requests the active driver's benchmarker. Without a GPU, upstream then
    raises "0 active drivers"."""
    if triton.runtime.driver._active is None:
        triton.runtime.driver.set_active(_InterpretingDriver(GPUTarget("cuda", 90, 32)))
