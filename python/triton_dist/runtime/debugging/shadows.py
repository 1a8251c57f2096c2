"""Notes beside each element of symmetric memory, for the check of races: who accessed it, and when.

Who is checked has a number: the programs of a rank that of the rank; its copy streams come behind
all ranks, in the same order.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from triton_dist import knobs
from triton_dist.runtime import addresses
from triton_dist.runtime.debugging.accesses import Access

_SHADOW = "~race"
WHO, COUNT, LINE, STORED, LOADED, FIRST = 0, 1, 2, 3, 4, 5
"""Columns: who stored (its number + 1), at which count, on which line, negative if by TMA; the
program that stored last, and the one that loaded last; then, for each number, at which count it
loaded, and what was released here."""


def own_rank() -> int:
    """Return this process's rank; 0 in a world of one, which may be given a rank of another."""
    return knobs.rank.get() % knobs.world_size.get()


def number_of(copying: bool) -> int:
    """Return the number of this rank's programs, or of its copy streams."""
    return own_rank() + (knobs.world_size.get() if copying else 0)


def how_many() -> int:
    """Return how many numbers there are."""
    return 2 * knobs.world_size.get()


def name_of(number: int) -> str:
    """Return what messages call a number."""
    rank = number % knobs.world_size.get()
    return f"rank {rank}" if rank == number else f"a copy stream of rank {rank}"


def _columns() -> int:
    return FIRST + 2 * how_many()


def with_shadows(
    regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """``regions``, and beside each one a region for what is noted of its elements."""
    shadows = {
        f"{name}{_SHADOW}": ((math.prod(shape), _columns()), torch.int32)
        for name, (shape, _) in regions.items()
    }
    return {**regions, **shadows}


def noted(access: Access) -> list[tuple[str, Any, Any]]:
    """(name, shadow, rows) of each region of symmetric memory that is accessed."""
    if knobs.world_size.get() == 1:
        return []
    touched, found = np.asarray(access.touched()).view(np.int64), []
    if not touched.size:
        return []
    for begin, end, name in addresses.regions_between(int(touched.min()), int(touched.max())):
        shadow = _shadow_of(begin, name)
        if shadow is not None:
            rows = touched - begin
            if touched.min() < begin or touched.max() >= end:
                rows = rows[(rows >= 0) & (rows < end - begin)]
            if rows.size:
                rows //= (end - begin) // len(shadow)
                found.append((name, shadow, rows))
    return found


def _shadow_of(begin: int, name: str) -> Any:
    """The notes of the region that begins there: the next of its name, in the same allocation."""
    region, of, owner = name.partition(" of rank ")
    entry = addresses.next_named(begin, f"{region}{_SHADOW}{of}{owner}")
    if entry is None:
        return None
    address, nbytes = entry
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, np.int32).reshape(-1, _columns())
