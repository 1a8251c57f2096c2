"""Debugging functions for kernels: ``breakpoint``, ``dump`` and the code of ``only_rows``."""

from __future__ import annotations

import copy
import sys
from typing import Any, Protocol

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
    """Stop here if ``condition`` is true for at least one element."""
    value = getattr(condition, "value", condition)  # unwrap a constexpr
    if np.any(value.handle.data if isinstance(value, tl.tensor) else value):
        debugger.stop_at_breakpoint(sys._getframe(1))


@jit
def _breakpoint_compiled(condition=True):
    """Do nothing, because only interpreted programs can stop."""


breakpoint = _breakpoint_interpreted if INTERPRETED.value else _breakpoint_compiled
"""``breakpoint(condition=True)``: stop the rank for ``triton-dist debug attach``.

Has no effect unless ``TRITON_DIST_DEBUG=attach`` is set.
"""


def _dump_interpreted(label: Any, *values: Any) -> None:
    """Print the rank, program and line, and each value with its type and shape."""
    label = getattr(label, "value", label)  # unwrap a constexpr
    if not isinstance(label, str):
        raise InvalidArgument("dump", "label", label, 'a string first, then values: dump("x", x)')
    printing.dump(label, values)


class Dump(Protocol):
    """Type of ``dump``."""

    def __call__(self, label: Any, *values: Any) -> None: ...


dump: Dump = _dump_interpreted if INTERPRETED.value else tl.device_print
"""``dump(label, *values)``: print values.

In the interpreter, print rank, program, line, type and shape. Compiled, this is
``tl.device_print``, which prints one line per element and no rank.
"""
