"""Distributed autotuning and overlapped GPU kernels on stock torch and stock Triton.

Importing this package does not use a GPU, driver or process group. Submodules are loaded at their
first use.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton_dist import autotuner as autotuner
    from triton_dist import language as language
    from triton_dist import tune as tune
    from triton_dist._jit import jit as jit

__version__ = "0.1.0"
__all__ = ["__version__", "autotuner", "jit", "language", "tune"]

_MODULES = ("autotuner", "language", "tune")

# The application decides where log records go, as is usual for libraries.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def _warn_if_mixed() -> None:
    """Warn if Triton-distributed is installed in the same folder.

    Its distribution is called ``triton_dist`` and also has a package ``triton_dist``. The
    distribution that is installed last overwrites files of the other distribution.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with suppress(OSError):  # not a folder: the package is in a zip file
        for name in os.listdir(folder):
            if name.startswith("triton_dist-") and name.endswith(".dist-info"):
                from triton_dist.errors import TritonDistWarning

                text = (
                    f"{folder} contains both triton-dist-tuner and another distribution, "
                    f"{name.removesuffix('.dist-info').replace('-', ' ')}. Each has a package "
                    "triton_dist, and their files overwrite each other. Use one environment for "
                    "each: pip uninstall triton_dist triton-dist-tuner, then install one of them."
                )
                warnings.warn(text, TritonDistWarning, stacklevel=3)


_warn_if_mixed()


def __getattr__(name: str) -> Any:
    if name == "jit":
        return importlib.import_module("triton_dist._jit").jit
    if name in _MODULES:
        return importlib.import_module(f"triton_dist.{name}")
    raise AttributeError(f"module 'triton_dist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
