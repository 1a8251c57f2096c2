"""``triton_dist.jit``: ``triton.jit`` for kernels that run on GPUs and, interpreted, on CPU
ranks."""

from __future__ import annotations

from typing import Any

import triton

from triton_dist.debugging import modes
from triton_dist.runtime import triton_compat
from triton_dist.runtime.compiling import shipped


def jit(fn: Any = None, **options: Any) -> Any:
    """Decorate a Triton kernel; takes what ``triton.jit`` takes and gives what it gives.

    Stock Triton keeps no state of the process in a kernel, so rank, world size and peer tables are
    ordinary arguments; name them in ``do_not_specialize`` and one compiled kernel serves all ranks.
    Where kernels are interpreted (``TRITON_INTERPRET=1`` at decoration), what Triton's interpreter
    gets wrong is mended first.

    Raises:
        UnsupportedVersion: torch or triton is outside the supported range.
        DebugModeRefused: ``TRITON_DIST_DEBUG`` asks for what would find nothing here.

    Launched where there is no GPU and kernels are not interpreted, it raises ``DeviceUnavailable``.
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
