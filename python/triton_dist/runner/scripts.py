"""Functions that scripts for triton-runner import, with triton-runner's names."""

from __future__ import annotations

import os
from typing import Any

import triton

from triton_dist.runner.function import jit

autotune = triton.autotune
"""Triton's own ``autotune``, whose configs may have ``autotune_cubin_dir``."""
_original_jit: dict[Any, Any] = {}  # ``jit`` by module, before it was replaced


def configure_jit_backend() -> None:
    """Replace ``triton.jit`` and ``gluon.jit`` by ``runner.jit`` in this process.

    This changes Triton for all code in the process. New code should use ``runner.jit`` directly.
    """
    from triton.experimental import gluon

    if _original_jit:
        return
    for module in (triton, gluon):
        _original_jit[module] = module.jit
        module.jit = _decorator(module.jit)


def _decorator(original: Any) -> Any:
    def decorate(fn: Any = None, **options: Any) -> Any:
        if fn is None:
            return lambda fn: decorate(fn, **options)
        return jit(original(fn, **options))

    return decorate


def restore_jit_backend() -> None:
    """Undo :func:`configure_jit_backend`. Kernels that were already decorated do not change."""
    while _original_jit:
        module, original = _original_jit.popitem()
        module.jit = original


def configure_autotune_backend() -> None:
    """Do nothing: ``triton.autotune`` works without configuration."""


def restore_autotune_backend() -> None:
    """Do nothing: :func:`configure_autotune_backend` changes nothing."""


def get_file_dir(file: str) -> str:
    """Return the folder of a script, given its ``__file__``."""
    return os.path.dirname(os.path.abspath(file))
