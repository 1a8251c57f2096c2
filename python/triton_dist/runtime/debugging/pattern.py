"""Bits of memory that holds nothing of use: a NaN that no arithmetic makes, or a rare integer."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOATS, INTEGERS = 0x7FFB, 0x7BFB
"""Every two bytes: a NaN in all floating-point types, and a number that is rare."""


def pattern(dtype: Any, floats: bool) -> Any:
    """One element of ``dtype``, of numpy, of two bytes or more."""
    word = FLOATS if floats else INTEGERS
    return np.frombuffer(word.to_bytes(2, "little") * (dtype.itemsize // 2), dtype)[0]


def fill(block: Any, element: Any, where: Any) -> None:
    """Put it into ``block``, an array of Triton's type ``element``; one-byte types are left."""
    if block.itemsize > 1:
        bits = block.view(np.dtype(f"u{block.itemsize}"))
        bits[where] = pattern(bits.dtype, element.is_floating())
