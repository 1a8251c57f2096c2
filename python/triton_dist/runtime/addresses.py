"""Names of addresses in symmetric memory, so that an error can say which flag was waited for."""

from __future__ import annotations

import bisect

# Sorted by base address; each entry is (base, bytes, element bytes, name).
_ranges: list[tuple[int, int, int, str]] = []


def register(base: int, nbytes: int, element_bytes: int, name: str) -> None:
    bisect.insort(_ranges, (base, nbytes, element_bytes, name))


def forget(base: int) -> None:
    _ranges[:] = [entry for entry in _ranges if entry[0] != base]


def describe_address(address: int) -> str:
    """``name[index]`` for an address inside a live region, else the address in hexadecimal."""
    position = bisect.bisect_right(_ranges, (address, 1 << 62, 0, "")) - 1
    if position >= 0:
        base, nbytes, element_bytes, name = _ranges[position]
        if address < base + nbytes:
            return f"{name}[{(address - base) // element_bytes}]"
    return hex(address)
