"""Words of kernels to those who debug them: nothing when compiled."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.language._spin import INTERPRETED
from triton_dist.runtime.debugging import stops


def _only_rows_interpreted(desc: Any, begin: Any, end: Any) -> Any:
    limited = copy.copy(desc)
    limited.handle = copy.copy(desc.handle)
    limited.handle.rows = int(begin), int(end)
    return limited


@jit
def _only_rows_compiled(desc, begin, end):
    return desc


only_rows_of = _only_rows_interpreted if INTERPRETED.value else _only_rows_compiled


def _breakpoint_interpreted(condition: Any = True) -> None:
    """Stop here if ``condition`` holds, of a block: for one of its elements."""
    value = getattr(condition, "value", condition)  # of a constexpr
    if np.any(value.handle.data if isinstance(value, tl.tensor) else value):
        stops.stop_if_wanted(sys._getframe(1))


@jit
def _breakpoint_compiled(condition=True):
    pass


breakpoint = _breakpoint_interpreted if INTERPRETED.value else _breakpoint_compiled
"""``breakpoint(condition=True)``: stop the rank there for ``triton-dist debug attach``, where
``TRITON_DIST_DEBUG=attach`` asks for it."""
