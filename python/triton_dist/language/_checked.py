"""Words of kernels to those who debug them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.debugging import debugger, printing
from triton_dist.errors import InvalidArgument
from triton_dist.language._spin import INTERPRETED


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
        debugger.stop_if_wanted(sys._getframe(1))


@jit
def _breakpoint_compiled(condition=True):
    pass


breakpoint = _breakpoint_interpreted if INTERPRETED.value else _breakpoint_compiled
"""``breakpoint(condition=True)``: stop the rank there for ``triton-dist debug attach``, where
``TRITON_DIST_DEBUG=attach`` asks for it."""


def _dump_interpreted(label: Any, *values: Any) -> None:
    label = getattr(label, "value", label)  # of a constexpr
    if not isinstance(label, str):
        raise InvalidArgument("dump", "label", label, "a text, and then the values: dump(label, x)")
    printing.dump(label, values)


dump: Any = _dump_interpreted if INTERPRETED.value else tl.device_print
"""``dump(label, *values)``: print values. Interpreted, with rank, program, line, type and shape;
compiled, this is ``tl.device_print``, which knows no rank and has a line for each element."""
