"""``@gluon_runner.jit``, which scripts for triton-runner import."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from triton_dist._jit import Kernel
from triton_dist.runner.function import jit as runner_jit

P = ParamSpec("P")
R = TypeVar("R")


def jit(fn: Callable[P, R]) -> Kernel[P, R]:
    """Decorate a Gluon kernel so that it can run from an artefact."""
    from triton.experimental import gluon

    kernel: Kernel[P, R] = runner_jit(gluon.jit(fn))
    return kernel
