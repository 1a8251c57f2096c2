"""Functions with the names of triton-runner: its scripts run after a change of the import."""

from __future__ import annotations

import os
from typing import Any

import triton

from triton_dist.runner.function import jit

autotune = triton.autotune
"""Triton's own ``autotune``, which works with ``autotune_cubin_dir``."""
_replaced: dict[Any, Any] = {}


def configure_jit_backend() -> None:
    """Replace ``triton.jit`` and ``gluon.jit`` by ``runner.jit`` in this process.

    This changes Triton for all code in the process. New code should use ``runner.jit`` directly.
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
    """Undo :func:`configure_jit_backend`; kernels decorated in the meantime are not changed."""
    while _replaced:
        module, original = _replaced.popitem()
        module.jit = original


def configure_autotune_backend() -> None:
    """Do nothing: ``triton.autotune`` works without configuration."""


def restore_autotune_backend() -> None:
    """Do nothing: :func:`configure_autotune_backend` changes nothing."""


def get_file_dir(file: str) -> str:
    """Return the folder of a script, given its ``__file__``."""
    return os.path.dirname(os.path.abspath(file))
