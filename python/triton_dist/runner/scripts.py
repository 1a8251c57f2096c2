"""Names that scripts for triton-runner call, so that they run with the import changed."""

from __future__ import annotations

import os
from typing import Any

import triton

from triton_dist.runner.function import jit

autotune = triton.autotune
"""Stock Triton's: it works with ``autotune_cubin_dir``."""
_replaced: dict[Any, Any] = {}


def configure_jit_backend() -> None:
    """Make ``triton.jit`` and ``gluon.jit`` mean ``runner.jit`` in this process, from now on.

    It changes Triton for everybody in the process. New code decorates with ``runner.jit`` instead.
    """
    from triton.experimental import gluon

    if _replaced:
        return
    for module in (triton, gluon):
        _replaced[module] = module.jit
        module.jit = _decorator(module.jit)


def _decorator(original: Any) -> Any:
    def decorate(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda fn: decorate(fn, **options)
        return jit(original(fn, **options))

    return decorate


def restore_jit_backend() -> None:
    """Undo :func:`configure_jit_backend`; what was decorated meanwhile stays as it is."""
    while _replaced:
        module, original = _replaced.popitem()
        module.jit = original


def configure_autotune_backend() -> None:
    """Do nothing: ``triton.autotune`` works as it is."""


def restore_autotune_backend() -> None:
    """Do nothing, as :func:`configure_autotune_backend` did."""


def get_file_dir(file: str) -> str:
    """The folder of a script, by its ``__file__``."""
    return os.path.dirname(os.path.abspath(file))
