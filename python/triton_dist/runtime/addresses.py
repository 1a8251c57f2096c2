"""Names of the regions of symmetric memory, so that messages can name the flag at an address. A
region is *live* from its registration until its memory is freed."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

# Live regions, sorted by base address: (base, bytes, element bytes, name, strides). ``strides`` are
# the strides of all dimensions except the last, in elements.
_regions: list[tuple[int, int, int, str, tuple[int, ...]]] = []
_identities: dict[int, str] = {}
"""Texts that identify regions on all ranks that map them, by base address in this process."""


def register(
    base: int,
    nbytes: int,
    element_bytes: int,
    name: str,
    shape: Sequence[int] = (),
    identity: str = "",
) -> None:
    """Register the region of ``nbytes`` bytes at address ``base``.

    Registered regions that overlap the new region are removed, because their memory was freed.

    Args:
        shape: shape of the region, to describe an element by an index for each dimension.
        identity: text that is equal on all ranks that map the region, and unique.
    """
    _identities[base] = identity
    end = base + nbytes
    _regions[:] = [each for each in _regions if each[0] + each[1] <= base or end <= each[0]]
    strides = tuple(math.prod(shape[dimension:]) for dimension in range(1, len(shape)))
    bisect.insort(_regions, (base, nbytes, element_bytes, name, strides))


def forget(base: int) -> None:
    _regions[:] = [entry for entry in _regions if entry[0] != base]


def region_at(address: int) -> tuple[int, int, str] | None:
    """Return ``(begin, end, name)`` of the live region that contains ``address``, or None."""
    entry = _entry_at(address)
    return None if entry is None else (entry[0], entry[0] + entry[1], entry[3])


def regions_between(low: int, high: int) -> list[tuple[int, int, str]]:
    """Return ``(begin, end, name)`` of each live region with bytes between the addresses ``low``
    and ``high``, both included."""
    first = max(0, bisect.bisect_right(_regions, (low, 1 << 62, 0, "", ())) - 1)
    last = bisect.bisect_right(_regions, (high, 1 << 62, 0, "", ()))
    return [
        (base, base + nbytes, name)
        for base, nbytes, _, name, _ in _regions[first:last]
        if low < base + nbytes
    ]


def next_region_named(address: int, name: str) -> tuple[int, int] | None:
    """Return ``(begin, bytes)`` of the first region ``name`` at or after ``address``, or None."""
    for base, nbytes, _, each, _ in _regions[bisect.bisect_left(_regions, (address,)) :]:
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
    """Return a text that identifies the memory at ``address`` on all ranks that map it, or None if
    no live region contains ``address``."""
    entry = _entry_at(address)
    if entry is None or not _identities.get(entry[0]):
        return None
    return f"{_identities[entry[0]]}+{address - entry[0]}"


def _entry_at(address: int) -> tuple[int, int, int, str, tuple[int, ...]] | None:
    position = bisect.bisect_right(_regions, (address, 1 << 62, 0, "", ())) - 1
    if position >= 0:
        entry = _regions[position]
        if address < entry[0] + entry[1]:
            return entry
    return None
