"""Names of regions of symmetric memory, so that error messages can name the flag at an address."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

# Sorted by base address. Each entry is (base, bytes, element bytes, name, strides). ``strides`` has
# the stride of each dimension but the last, in elements.
_ranges: list[tuple[int, int, int, str, tuple[int, ...]]] = []
_identities: dict[int, str] = {}
"""By base address of a region: text that is equal on all ranks that map the region."""


def register(
    base: int,
    nbytes: int,
    element_bytes: int,
    name: str,
    shape: Sequence[int] = (),
    identity: str = "",
) -> None:
    """Name a region of ``nbytes`` bytes.

    Registered regions that overlap the new region are removed: their memory was freed.

    Args:
        shape: shape of the region, to describe an element by an index for each dimension.
        identity: text that is equal on all ranks that map the region, and unique.
    """
    _identities[base] = identity
    end = base + nbytes
    _ranges[:] = [each for each in _ranges if each[0] + each[1] <= base or end <= each[0]]
    strides = tuple(math.prod(shape[dimension:]) for dimension in range(1, len(shape)))
    bisect.insort(_ranges, (base, nbytes, element_bytes, name, strides))


def forget(base: int) -> None:
    _ranges[:] = [entry for entry in _ranges if entry[0] != base]


def region_at(address: int) -> tuple[int, int, str] | None:
    """Return ``(begin, end, name)`` of the live region that contains ``address``, or None."""
    entry = _entry_at(address)
    return None if entry is None else (entry[0], entry[0] + entry[1], entry[3])


def regions_between(low: int, high: int) -> list[tuple[int, int, str]]:
    """Return ``(begin, end, name)`` of each live region that overlaps ``low`` to ``high``."""
    first = max(0, bisect.bisect_right(_ranges, (low, 1 << 62, 0, "", ())) - 1)
    last = bisect.bisect_right(_ranges, (high, 1 << 62, 0, "", ()))
    return [
        (base, base + nbytes, name)
        for base, nbytes, _, name, _ in _ranges[first:last]
        if low < base + nbytes
    ]


def next_named(address: int, name: str) -> tuple[int, int] | None:
    """Return ``(begin, bytes)`` of the first region ``name`` at or after ``address``, or None."""
    for base, nbytes, _, each, _ in _ranges[bisect.bisect_left(_ranges, (address,)) :]:
        if each == name:
            return base, nbytes
    return None


def describe_address(address: int) -> str:
    """Return ``name[index]`` for an address in a live region, else the address in hexadecimal."""
    entry = _entry_at(address)
    if entry is None:
        return hex(address)
    base, _, element_bytes, name, strides = entry
    index = (address - base) // element_bytes
    indices = []
    for stride in strides:
        outer, index = divmod(index, stride)
        indices.append(outer)
    return f"{name}[{', '.join(map(str, [*indices, index]))}]"


def identify(address: int) -> str | None:
    """Return text that is equal on all ranks for the memory at ``address``; ``None``: unknown."""
    entry = _entry_at(address)
    if entry is None or not _identities.get(entry[0]):
        return None
    return f"{_identities[entry[0]]}+{address - entry[0]}"


def _entry_at(address: int) -> tuple[int, int, int, str, tuple[int, ...]] | None:
    position = bisect.bisect_right(_ranges, (address, 1 << 62, 0, "", ())) - 1
    if position >= 0:
        entry = _ranges[position]
        if address < entry[0] + entry[1]:
            return entry
    return None
