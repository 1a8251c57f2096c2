"""``torch.empty`` that holds NaN instead of whatever lay in that memory.

A kernel that reads, or leaves unwritten, an element of a fresh buffer mostly finds a harmless value
there, so the mistake shows once in a hundred runs. With NaN it shows in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """While active, the ``torch.empty`` family returns floating-point tensors full of NaN.

    Integer tensors are left alone: they have no value that spreads.
    """
    originals = [
        (owner, name, getattr(owner, name))
        for owner, names in (
            (torch, ("empty", "empty_like", "empty_strided")),
            (torch.Tensor, ("new_empty", "new_empty_strided")),
        )
        for name in names
    ]
    for owner, name, allocate in originals:
        setattr(owner, name, _poisoned(allocate))
    try:
        yield
    finally:
        for owner, name, allocate in originals:
            setattr(owner, name, allocate)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(allocate)
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))
        return tensor

    return poisoned
