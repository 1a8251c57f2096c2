"""Distributed autotuning and overlapped GPU kernels on stock torch and stock Triton.

Importing this package touches no GPU, driver or process group: submodules are loaded at first use.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_dist import autotuner as autotuner
    from triton_dist import language as language
    from triton_dist import tune as tune
    from triton_dist._jit import jit as jit

__version__ = "0.1.0"
__all__ = ["__version__", "autotuner", "jit", "language", "tune"]

_MODULES = ("autotuner", "language", "tune")

# Standard practice for libraries: the application decides where log records go.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name == "jit":
        return importlib.import_module("triton_dist._jit").jit
    if name in _MODULES:
        return importlib.import_module(f"triton_dist.{name}")
    raise AttributeError(f"module 'triton_dist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
