"""``triton_dist.jit``: ``triton.jit`` for kernels that run on GPUs and in the interpreter."""

from __future__ import annotations

from typing import Any

import triton

from triton_dist.debugging import modes
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling import shipped


def jit(fn: Any = None, **options: Any) -> Any:
    """Decorate a Triton kernel. Arguments and result are identical to ``triton.jit``.

    Stock Triton stores no process state in a kernel, so rank, world size and peer tables are
    ordinary arguments. Name them in ``do_not_specialize`` to share one compiled kernel between
    ranks. If ``TRITON_INTERPRET=1`` is set at decoration, workarounds for bugs of Triton's
    interpreter are installed first.

    Raises:
        UnsupportedVersion: torch or triton is outside the supported range.
        DebugModeRefused: ``TRITON_DIST_DEBUG`` selects a mode that has no effect here.

    A launch without a GPU raises ``DeviceUnavailable`` unless kernels are interpreted.
    """
    triton_compat.check_versions()
    modes.activate()
    if triton_compat.is_interpreting():
        modes.install_interpreter()
    else:
        triton_compat.pin_defaults()
        triton_compat.explain_missing_driver()
        shipped.install()
    return triton.jit(fn, **options) if fn is not None else triton.jit(**options)
