"""``triton_dist.jit``: ``triton.jit`` for kernels that run on GPUs and in the interpreter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

import triton

from triton_dist.debugging import modes
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling import shipped

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Kernel(Protocol[P, R_co]):
    """A kernel or a function for kernels, as type checkers see it."""

    @property
    def fn(self) -> Callable[P, R_co]: ...

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def __getitem__(self, grid: Any) -> Callable[..., Any]: ...

    def __getattr__(self, name: str) -> Any: ...


@overload
def jit(fn: Callable[P, R], **options: Any) -> Kernel[P, R]: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[P, R]], Kernel[P, R]]: ...
def jit(fn: Any = None, **options: Any) -> Any:
    """Decorate a Triton kernel. Arguments and result are identical to ``triton.jit``.

    Stock Triton stores no process state in a kernel, so rank, world size and peer tables are
    ordinary arguments. Name them in ``do_not_specialize`` to share one compiled kernel between
    ranks. If ``TRITON_INTERPRET=1`` is set at decoration, workarounds for bugs of Triton's
    interpreter are installed first. ``inspect.signature`` and ``help`` show the kernel's function.

    Raises:
        UnsupportedVersion: torch or triton is outside the supported range.
        DebugModeRefused: ``TRITON_DIST_DEBUG`` selects a mode that has no effect here.

    A launch without a GPU raises ``DeviceUnavailable`` unless kernels are interpreted.
    """
    if fn is None:
        return lambda function: jit(function, **options)
    triton_compat.check_versions()
    modes.activate()
    if triton_compat.is_interpreting():
        modes.install_interpreter()
    else:
        triton_compat.pin_defaults()
        triton_compat.explain_missing_driver()
        shipped.install()
    return describe(triton.jit(fn, **options))


def describe(kernel: Any) -> Any:
    """Return ``kernel`` with the signature and the names of its function, for ``help`` and IDEs."""
    fn = kernel.fn
    kernel.__signature__ = inspect.signature(fn)
    kernel.__module__, kernel.__qualname__ = fn.__module__, fn.__qualname__
    # help() shows no signature for this type. Begin the text with it, as for a builtin function.
    kernel.__doc__ = f"{fn.__name__}{kernel.__signature__}\n\n{inspect.getdoc(fn) or ''}".rstrip()
    return kernel
