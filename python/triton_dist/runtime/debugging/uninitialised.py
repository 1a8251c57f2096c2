"""Reads of memory that nobody wrote.

While on, the ``torch.empty`` family returns CPU tensors full of one pattern, and a kernel that
loads it is refused. A copy of such memory has the pattern too. In a floating-point type it is a NaN
that no arithmetic makes; integers of one byte have no value to spare and are not checked.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch

from triton_dist.runtime.debugging.accesses import Access, Undo, replace, undo_all
from triton_dist.runtime.debugging.faults import UninitialisedRead
from triton_dist.runtime.debugging.pattern import FLOATS, INTEGERS, pattern
from triton_dist.runtime.debugging.site import site

_ALLOCATIONS = (
    (torch, ("empty", "empty_like", "empty_strided")),
    (torch.Tensor, ("new_empty", "new_empty_strided")),
)


class Uninitialised:
    """Refuses loads of the pattern."""

    def before(self, access: Access) -> None:
        """Nothing: it shows in what is read."""

    def after(self, access: Access, values: Any) -> None:
        if access.kind != "load" or values is None or access.itemsize < 2:
            return
        bits = np.asarray(values).view(np.dtype(f"u{access.itemsize}"))
        found = bits == pattern(bits.dtype, access.element.is_floating())
        if access.mask is not None:
            found = found & access.mask
        if found.any():
            first = int(np.flatnonzero(found)[0])
            raise UninitialisedRead(
                f"{site()}: {np.count_nonzero(found)} of {found.size} elements that are loaded "
                f"were never written since torch.empty, the first at index {first} of the block"
            )


def poison() -> Undo:
    """Fill what the ``torch.empty`` family returns with the pattern, until undone."""

    def poisoned(allocate: Any) -> Any:
        @wraps(allocate)
        def filled(*args: Any, **named: Any) -> Any:
            tensor = allocate(*args, **named)
            is_plain = tensor.device.type == "cpu" and tensor.layout is torch.strided
            if is_plain and tensor.element_size() > 1:
                floats = tensor.is_floating_point() or tensor.is_complex()
                words = torch.tensor([], dtype=torch.int16).set_(tensor.untyped_storage())
                words.fill_(FLOATS if floats else INTEGERS)
            return tensor

        return filled

    undos = [replace(owner, name, poisoned) for owner, names in _ALLOCATIONS for name in names]
    return undo_all(undos)
