"""Define ``triton_dist.jit``: ``triton.jit`` for kernels on GPUs and in Triton's interpreter."""

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
    """Type of a decorated kernel, or of a function that kernels call, for type checkers."""

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
    """Decorate a Triton kernel. The arguments and the result are those that ``triton.jit`` has.

    Triton stores no state of the process in a kernel, so rank, world size and tables of peer
    addresses are ordinary arguments. Name them in ``do_not_specialize``, so that all ranks share
    one compiled kernel. If ``TRITON_INTERPRET=1`` is set at decoration, workarounds for bugs of
    Triton's interpreter are installed first. ``inspect.signature`` and ``help`` show the signature
    and docstring of ``fn``.

    Raises:
        UnsupportedVersion: torch or triton is outside the supported range.
        DebugModeRefused: ``TRITON_DIST_DEBUG`` selects a mode that cannot work in this process.

    Unless kernels are interpreted, a launch without a GPU raises ``DeviceUnavailable``.
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
    return with_signature_and_doc(triton.jit(fn, **options))


def with_signature_and_doc(kernel: Any) -> Any:
    """Set the signature and the names of the kernel's function on ``kernel``, for ``help`` and
    IDEs. Return ``kernel``."""
    fn = kernel.fn
    kernel.__signature__ = inspect.signature(fn)
    kernel.__module__, kernel.__qualname__ = fn.__module__, fn.__qualname__
    # help() shows no signature for this type, so put it at the beginning of the docstring.
    kernel.__doc__ = f"{fn.__name__}{kernel.__signature__}\n\n{inspect.getdoc(fn) or ''}".rstrip()
    return kernel
