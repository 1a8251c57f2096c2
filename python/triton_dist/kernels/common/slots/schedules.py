"""Steps of an all-gather by copy engines, method by method.

Each copy of rows is followed on its stream by the copy of an 8-byte flag. What a flag is copied
from must lie on another GPU than what it is copied to: the driver may give a copy within one GPU to
an SM, which a full grid that waits for the flag never frees.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from triton_dist.runtime.device.transfer import AwaitFlag, Copy, OwnRows, SetFlag, Step

MAX_CHUNKS = 8
"""Most chunks of a shard: along its rows, in a fused method along K."""
MAX_COMM_SMS = 32
"""Programs of a consumer that send."""


class AllGatherMethod(enum.Enum):
    """Method of an all-gather. By copy engine this rank receives rank + 1's shard first, then rank
    + 2's, and so on."""

    FULL_MESH_PUSH = "full_mesh_push"
    """Every rank copies its shard straight to each peer."""
    FULL_MESH_PULL = "full_mesh_pull"
    """Every rank stages its shard and copies each peer's to itself, after a barrier."""
    RING_PUSH_1D = "ring_push_1d"
    """Every rank hands on to rank - 1 what it has; for links between neighbours only."""
    FUSED_PUSH = "fused_push"
    """A few programs of the consumer's own grid copy the shard to all peers, in chunks along K. For
    small shards: it needs no copy engine, and no launch but the consumer's."""
    SERIAL = "serial"
    """One launch of our all-gather brings all shards, then ``torch.matmul``: nothing is hidden. For
    few rows, whose transfer takes less than hiding it."""

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_fused(self) -> bool:
        """The consumer does the transfer, and not copy engines."""
        return self is AllGatherMethod.FUSED_PUSH

    @property
    def by_copy_engine(self) -> bool:
        """Copy engines do the transfer while the consumer runs."""
        return self not in (AllGatherMethod.FUSED_PUSH, AllGatherMethod.SERIAL)


@dataclass(frozen=True)
class Slot:
    """One slot of an all-gather buffer, as rank ``rank`` sees it.

    Attributes:
        shards: [num_ranks * rows, K] of each rank, by rank.
        arrivals: flags of each rank, by rank.
        epoch: [1], what the own flags are copied from in a push; a ring hands on with a chunk the
            flag that it came with, so that every rank learns whose shard has how many rows.
        staged_epochs: [1] of each rank, by rank: what flags are copied from in a pull.
        forward: flags of a ring that say that a chunk may be handed on, by rank.
        one: [1], holds 1.
    """

    rank: int
    num_ranks: int
    rows: int
    shards: Sequence[torch.Tensor]
    arrivals: Sequence[torch.Tensor]
    epoch: torch.Tensor
    staged_epochs: Sequence[torch.Tensor]
    forward: Sequence[torch.Tensor]
    one: torch.Tensor

    def chunk_rows(self, num_chunks: int) -> int:
        """Rows that share a flag."""
        return rows_of_chunk(self.rows, num_chunks)


def rows_of_chunk(rows: int, num_chunks: int) -> int:
    """Rows that share a flag when a shard of ``rows`` rows is cut in ``num_chunks``."""
    return max(1, -(-rows // num_chunks))


def schedule(
    slot: Slot, method: AllGatherMethod, num_streams: int, num_chunks: int
) -> tuple[Step, ...]:
    """Steps that rank ``slot.rank`` queues on its ``num_streams`` streams, by copy engine."""
    steps = {
        AllGatherMethod.FULL_MESH_PUSH: _push,
        AllGatherMethod.FULL_MESH_PULL: _pull,
        AllGatherMethod.RING_PUSH_1D: _push_ring,
    }[method]
    return tuple(steps(slot, num_streams, num_chunks))


def _chunks(slot: Slot, step: int, num_streams: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """(stream, chunk, first row, end) of a shard's chunks, after ``step`` other shards."""
    size = slot.chunk_rows(num_chunks)
    starts = range(0, slot.rows, size)
    for chunk, first in enumerate(starts):
        stream = (step * len(starts) + chunk) % num_streams
        yield stream, chunk, first, min(first + size, slot.rows)


def _push(slot: Slot, num_streams: int, num_chunks: int) -> Iterator[Step]:
    for step in range(1, slot.num_ranks):
        peer = (slot.rank - step) % slot.num_ranks
        for stream, chunk, first, end in _chunks(slot, step, num_streams, num_chunks):
            begin = slot.rank * slot.rows
            flag = slot.rank * MAX_CHUNKS + chunk
            target = slot.shards[peer][begin + first : begin + end]
            yield Copy(stream, target, OwnRows(first, end))
            yield Copy(stream, slot.arrivals[peer][flag : flag + 1], slot.epoch)


def _pull(slot: Slot, num_streams: int, num_chunks: int) -> Iterator[Step]:
    for step in range(1, slot.num_ranks):
        peer = (slot.rank + step) % slot.num_ranks
        for stream, chunk, first, end in _chunks(slot, step, num_streams, num_chunks):
            rows = slice(peer * slot.rows + first, peer * slot.rows + end)
            flag = peer * MAX_CHUNKS + chunk
            yield Copy(stream, slot.shards[slot.rank][rows], slot.shards[peer][rows])
            target = slot.arrivals[slot.rank][flag : flag + 1]
            yield Copy(stream, target, slot.staged_epochs[peer])


def _push_ring(slot: Slot, num_streams: int, num_chunks: int) -> Iterator[Step]:
    neighbour = (slot.rank - 1) % slot.num_ranks
    for step in range(slot.num_ranks - 1):
        shard = (slot.rank + step) % slot.num_ranks
        for stream, chunk, first, end in _chunks(slot, step, num_streams, num_chunks):
            rows = slice(shard * slot.rows + first, shard * slot.rows + end)
            flag = shard * MAX_CHUNKS + chunk
            if step > 0:  # not ours: wait for it; the flag is back at 0 before its next use
                yield AwaitFlag(stream, slot.forward[slot.rank], flag, 1)
                yield SetFlag(stream, slot.forward[slot.rank], flag, 0)
            source = OwnRows(first, end) if step == 0 else slot.shards[slot.rank][rows]
            value = slot.epoch if step == 0 else slot.arrivals[slot.rank][flag : flag + 1]
            yield Copy(stream, slot.shards[neighbour][rows], source)
            yield Copy(stream, slot.arrivals[neighbour][flag : flag + 1], value)
            if step < slot.num_ranks - 2:  # the neighbour hands it on
                yield Copy(stream, slot.forward[neighbour][flag : flag + 1], slot.one)
