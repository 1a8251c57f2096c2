"""Flags of a call that carry its size, so that who waits for a peer also learns whether the peer
came with as many rows.

A flag is int64: which call it is of, above, and the size in the lowest 20 bits
(``language.sized``). Whoever waits for it compares both: two integer operations, and no access to
memory more. The size in it is of the call that set it, whatever the peer has done since.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit
from triton_dist.language.signals import SIZE_BITS, sized

_PRIME = 2**20 - 3


@jit
def epoch_at(epoch_ptr):
    """The epoch of a slot whose line begins at ``epoch_ptr`` (``slots/epochs.py``)."""
    return tl.load(epoch_ptr) >> SIZE_BITS


@jit
def flag_of(epoch_ptr, size):
    """Flag of the slot's present use, set and awaited in a call of ``size``."""
    return sized(epoch_at(epoch_ptr), size)


def size_in(flag: int) -> int:
    """The size in a flag, on the host, modulo 2**20."""
    mask: int = (1 << SIZE_BITS.value) - 1
    return flag & mask


def count_in(flag: int) -> int:
    """The count in a flag, on the host."""
    places: int = SIZE_BITS.value
    return flag >> places


def flag_value(count: int, size: int) -> int:
    """``language.sized`` on the host: an int64, which wraps around as on the device."""
    places: int = SIZE_BITS.value
    flag = (count << places | size_in(size)) % 2**64
    return flag - 2**64 if flag >= 2**63 else flag


def folded(number: int) -> int:
    """A number of elements as a size: as it is below the largest prime that a flag has room for,
    else modulo that, since numbers of elements mostly differ by multiples of powers of two."""
    return number % _PRIME
