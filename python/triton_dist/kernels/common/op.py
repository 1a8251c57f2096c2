"""What makes an op of a function: a tuning over all ranks, known by the name of the op's folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton_dist import tune


def op(**settings: Any) -> Callable[[Callable[..., Any]], tune.AutoTuner]:
    """Decorate the function of a folder's ``op.py``; ``settings``: of ``tune.autotune``.

    Records, errors and pickles name the folder, from which users import the op, so that files
    inside it can be named anew without a tuning being lost.
    """

    def decorate(fn: Callable[..., Any]) -> tune.AutoTuner:
        fn.__module__ = fn.__module__.rpartition(".")[0]
        return tune.autotune(**settings)(fn)

    return decorate
