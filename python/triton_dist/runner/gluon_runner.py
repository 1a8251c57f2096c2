"""``@gluon_runner.jit``, which scripts for triton-runner import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_dist.runner.function import jit as runner_jit


def jit(fn: Callable[..., Any]) -> Any:
    """Decorate a Gluon kernel so that it can run from an artefact."""
    from triton.experimental import gluon

    return runner_jit(gluon.jit(fn))
