"""Knowledge of kernels about peers: where their memory is, flags that they set, and their shards.

Addresses of peers' memory are read from tables. A flag of a call carries its size, so that who
waits for a peer also learns whether the peer came with as many rows: it is int64, which call it is
of, above, and the size in the lowest 20 bits (``language.sized``). Whoever waits for it compares
both: two integer operations, and no access to memory more. The size in it is of the call that set
it, whatever the peer has done since.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.language.signals import SIZE_BITS, sized

# Bytes of which every target is a multiple. The compiler knows nothing of an address from a table;
# without this it stores 2 bytes at a time.
TARGET_ALIGNMENT = tl.constexpr(16)
# Word of a slot's line at which the guard begins, after the epoch.
GUARD = tl.constexpr(1)
_PRIME = 2**20 - 3


@jit
def target_at(targets_ptr, row_block, like_ptr):
    """Address to which the tiles of ``row_block`` go. The hint stands here, since one on the result
    of a call is lost when the call is inlined (Triton 3.6)."""
    return tl.multiple_of(tl.load(targets_ptr + row_block).to(like_ptr.dtype), TARGET_ALIGNMENT)


@jit
def epoch_at(epoch_ptr):
    """The epoch of a slot whose line begins at ``epoch_ptr`` (``slots/epochs.py``)."""
    return tl.load(epoch_ptr) >> SIZE_BITS


@jit
def guard_of(epoch_ptr):
    """The guard of the waits in a slot whose line begins at ``epoch_ptr`` (``slots/epochs.py``)."""
    return epoch_ptr + GUARD


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


@dataclass(frozen=True)
class ShardPush:
    """Memory that a consumer needs to send this rank's shard itself (``gemm/units.py``).

    shards, arrivals: int64 [num_ranks], addresses of each rank's gathered rows and flags.
    consumed: int32 [num_ranks], the last epoch whose shards each peer has consumed.
    num_comm_sms: programs that send. num_chunks: of a shard, along K.
    """

    shards: torch.Tensor
    arrivals: torch.Tensor
    consumed: torch.Tensor
    num_comm_sms: int
    num_chunks: int


@dataclass(frozen=True)
class GatheredShards:
    """The shards of the other ranks and the flags that say which rows are there.

    ``rows`` [M, K] contiguous; flag ``arrivals[s * flags_per_rank + c]`` stands for rows
    ``[c * chunk_rows, (c + 1) * chunk_rows)`` of shard s and is awaited to reach ``epoch[0]``. Both
    are int64 as in this file; behind the epoch lies the guard of the waits.
    With a ``push`` the consumer sends the own shard, and flags stand for chunks along K.
    """

    rows: torch.Tensor
    arrivals: torch.Tensor
    epoch: torch.Tensor
    chunk_rows: int
    flags_per_rank: int
    push: ShardPush | None = None
