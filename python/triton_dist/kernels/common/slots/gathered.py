"""All-gather producers: they bring every rank's shard into a local buffer and set a flag for each
chunk, in slots that take turns by the protocol of ``slots/epochs.py``.

No producer here uses an SM for data: copies go to a copy engine, and a flag is an 8-byte copy that
follows its data on the same stream. What a flag is copied from must lie on another GPU than what it
is copied to: the driver may give a copy within one GPU to an SM, which a full grid that waits for
the flag never frees. In a fused method the consumer is the producer, too, in the same slots and by
the same protocol; it checks its peers itself (``gemm/work_items.py``).

Flags are copied from device memory, this rank's epoch. So flag writes need no SM, either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.launch import Bounded, Launch
from triton_dist.kernels.common.peers import Disagreements, GatheredShards, ShardPush
from triton_dist.kernels.common.slots import epochs
from triton_dist.kernels.common.slots.epochs import EpochSlots, Expected, InSlots
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, OwnRows, SetFlag, Step

MAX_CHUNKS = 8
"""Most chunks of a shard: along its rows, in a fused method along K."""
MAX_COMM_SMS = 32
"""Programs of a consumer that send."""
_PUSHED_FLAGS = MAX_CHUNKS * MAX_COMM_SMS  # of a rank
_GAVE_UP = epochs.GAVE_UP


class AllGatherMethod(enum.Enum):
    """Method of an all-gather. By copy engine this rank receives rank + 1's shard first, then rank
    + 2's, and so on."""

    FULL_MESH_PUSH = "full_mesh_push"
    """Every rank copies its shard straight to each peer."""
    RING_PUSH_1D = "ring_push_1d"
    """Every rank hands on to rank - 1 what it has; for links between neighbours only."""
    FUSED_PUSH = "fused_push"
    """A few programs of the consumer's own grid copy the shard to all peers, in chunks along K. For
    small shards: it needs no copy engine, and no launch but the consumer's."""
    SERIAL = "serial"
    """One launch of our all-gather brings all shards, then ``torch.matmul``: nothing is hidden. For
    few rows, whose transfer takes less than hiding it."""

    __repr__ = enum.Enum.__str__

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
        epoch: [1], what the own flags are copied from; a ring hands on with a chunk the flag that
            it came with, so that every rank learns whose shard has how many rows.
        forward: flags of a ring that say that a chunk may be handed on, by rank.
        one: [1], holds 1.
    """

    rank: int
    num_ranks: int
    rows: int
    shards: Sequence[torch.Tensor]
    arrivals: Sequence[torch.Tensor]
    epoch: torch.Tensor
    forward: Sequence[torch.Tensor]
    one: torch.Tensor


def rows_of_chunk(rows: int, num_chunks: int) -> int:
    """Rows that share a flag when a shard of ``rows`` rows is cut in ``num_chunks``."""
    return max(1, -(-rows // num_chunks))


def schedule(
    slot: Slot, method: AllGatherMethod, num_streams: int, num_chunks: int
) -> tuple[Step, ...]:
    """Steps that rank ``slot.rank`` queues on its ``num_streams`` streams, by copy engine."""
    steps = _push_ring if method is AllGatherMethod.RING_PUSH_1D else _push
    return tuple(steps(slot, num_streams, num_chunks))


def _chunks(slot: Slot, step: int, num_streams: int, num_chunks: int) -> Iterator[tuple[int, ...]]:
    """(stream, chunk, first row, end) of a shard's chunks, after ``step`` other shards."""
    size = rows_of_chunk(slot.rows, num_chunks)
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


@jit(do_not_specialize=["num_flags"])
def kernel_release_copies(epoch_ptr, forward_ptr, num_flags):
    """Let copy streams hand on what has not come, if a wait of the call gave up. Grid (1,)."""
    if tl.load(epoch_ptr + _GAVE_UP) != 0:
        flag = 0
        while flag < num_flags:
            tl.store(forward_ptr + flag, 1)
            flag += 1


@dataclass(frozen=True)
class _Plan:
    """An all-gather of some shape and method in one slot.

    gathered: what its consumer reads. expected: the flags that its kernels wait for.
    transfer: what copy engines do; ``None`` where the consumer sends.
    hands_on: copies wait for what peers bring.
    """

    gathered: GatheredShards
    expected: Expected
    transfer: Any = None
    hands_on: bool = False


class AllGatherBuffer(InSlots):
    """Double-buffered symmetric memory for all-gathers of up to ``max_M`` rows of ``K`` elements.
    Creation is collective.

    A slot has, on each rank:
        shards [max_M * K] of ``dtype``, the gathered rows: written by peers.
        arrivals int64 [source rank, MAX_CHUNKS], flags of its chunks: by the same.
        pushed int64 [source rank, flags of its senders' chunks]: by peers' consumers.
        forward int32 [source rank, MAX_CHUNKS], chunks to hand on in a ring: set by the neighbour,
            set back by this rank's copy engines.
    ``workspace`` [max_M, K], once, is the caller's: no transfer uses it.
    """

    def __init__(
        self, max_M: int, K: int, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str
    ) -> None:
        size = dist.get_world_size(group) if dist.is_initialized() else 1
        flags = {
            "arrivals": ((size * MAX_CHUNKS,), torch.int64),
            "pushed": ((size * _PUSHED_FLAGS,), torch.int64),
            "forward": ((size * MAX_CHUNKS,), torch.int32),
        }
        slots = EpochSlots(
            name,
            {"shards": ((max_M * K,), dtype), **flags},
            tuple(flags),
            "a kernel of the all-gather or its consumer",
            group,
            single={"workspace": ((max_M, K), dtype)},
            found=Disagreements(f"the rows of A in {name}", group),
            flags_of_rank={"arrivals": MAX_CHUNKS, "pushed": _PUSHED_FLAGS},
        )
        super().__init__(slots)
        self.workspace = self.slots.memory["workspace"].local
        self._K = K
        self._device = self.slots.device
        self._one = torch.ones(1, dtype=torch.int32, device=self._device.torch_device)
        self._streams: list[Any] = [self._device.copy_stream()]
        self._gathered: Bounded[Any, GatheredShards] = Bounded()
        self._plans: Bounded[Any, _Plan] = Bounded()
        self._started: _Plan | None = None
        self._device.synchronize()  # calls may come on any stream

    def start(
        self, own: torch.Tensor, method: AllGatherMethod, num_streams: int, num_chunks: int
    ) -> GatheredShards:
        """Queue the all-gather of ``own`` [rows, K], contiguous; the caller queues the consumer
        next."""
        if not method.by_copy_engine:
            expected = "a copy engine's; of what the consumer does see start_fused"
            raise InvalidArgument("start", "method", method, expected)
        rows = own.shape[0]
        self.slots.take(rows, copied=True)
        if self.num_ranks == 1:
            return self.describe(rows, num_chunks)
        key = (self.slots.index, rows, method, num_streams, num_chunks)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(rows, method, num_streams, num_chunks)
        self._started = plan
        plan.transfer.start(own, self._device.current_stream())
        return plan.gathered

    def start_fused(self, rows: int, num_comm_sms: int, num_chunks: int) -> GatheredShards:
        """Begin an all-gather of ``rows`` rows of each rank that the consumer does, which the
        caller queues next: a launch of ``sharded_gemm``."""
        self.slots.take(rows, peer_check=False)
        key = (self.slots.index, rows, num_comm_sms, num_chunks)
        plan = self._plans.get(key)
        if plan is None:
            gathered = self.describe(rows, num_chunks, num_comm_sms)
            flags = num_comm_sms * num_chunks
            plan = self._plans[key] = _Plan(gathered, self._expects("pushed", flags, _PUSHED_FLAGS))
        self._started = plan
        return plan.gathered

    def describe(self, rows: int, num_chunks: int, num_comm_sms: int = 0) -> GatheredShards:
        """Rows and flags that a consumer of shards of ``rows`` rows reads in the current slot; with
        ``num_comm_sms``, also the targets to which so many of its programs send the own shard."""
        key = (self.slots.index, rows, num_chunks, num_comm_sms)
        known = self._gathered.get(key)
        if known is None:
            known = self._gathered[key] = GatheredShards(
                self._shards(self.rank, rows),
                self.slots["pushed" if num_comm_sms else "arrivals"].local,
                self.slots.epoch,
                rows_of_chunk(rows, 1 if num_comm_sms else num_chunks),
                _PUSHED_FLAGS if num_comm_sms else MAX_CHUNKS,
                self._push(num_comm_sms, num_chunks) if num_comm_sms else None,
            )
        return known

    def finish(self, awaited: bool = False) -> None:
        """Queue the end of the all-gather after its consumer: own copies are out, peers may go
        on.

        ``awaited``: the consumer is queued and waits for every chunk of every peer; then the next
        call can begin without a peer check.
        """
        plan, self._started = self._started, None
        if plan is None:  # of one rank
            return
        if plan.transfer is not None:
            if plan.hands_on:
                # A copy stream may wait for what will not come, and the join would for it.
                self._release_copies()
            plan.transfer.join(self._device.current_stream())
        self.slots.finish(awaited, plan.expected)

    def reset(self) -> None:
        # Where the consumer was never launched, nobody gave up on what a copy stream waits for.
        forward = [self.slots.of_slot(slot, "forward").local for slot in range(epochs.SLOTS)]
        self._device.aside(lambda: [flags.fill_(1) for flags in forward])
        super().reset()

    def free(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._gathered.clear()
        self._plans.clear()
        super().free()

    def _release_copies(self) -> None:
        def launch() -> Launch:
            forward = self.slots["forward"].local
            arguments = (self.slots.epoch, forward, forward.numel())
            return Launch(kernel_release_copies, (1,), arguments, {"num_warps": 1})

        self.slots.launcher.run((kernel_release_copies, self.slots.index), launch)

    def _plan(self, rows: int, method: AllGatherMethod, num_streams: int, num_chunks: int) -> _Plan:
        """The all-gather of shards of ``rows`` rows in the current slot, by copy engines."""
        while len(self._streams) < num_streams:
            self._streams.append(self._device.copy_stream())
        slot = Slot(
            self.rank,
            self.num_ranks,
            rows,
            [self._shards(rank, rows) for rank in range(self.num_ranks)],
            self.slots["arrivals"].peers,
            self.slots.epoch[:1],
            self.slots["forward"].peers,
            self._one,
        )
        steps = schedule(slot, method, num_streams, num_chunks)
        gathered = self.describe(rows, num_chunks)
        hands_on = method is AllGatherMethod.RING_PUSH_1D
        if hands_on:
            # Loads the kernel: for that CUDA may wait for the device, and once it is needed, copies
            # wait for the kernel (4 H200, a ring with a rank missing: hung).
            self._release_copies()
        return _Plan(
            gathered,
            self._expects("arrivals", -(-rows // gathered.chunk_rows), MAX_CHUNKS),
            self._device.transfer(steps, self._streams[:num_streams]),
            hands_on=hands_on,
        )

    def _expects(self, region: str, number: int, distance: int) -> Expected:
        """The first ``number`` flags of each peer, whose flags are ``distance`` apart."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]

        def expected() -> dict[str, list[int]]:
            flags = [peer * distance + flag for peer in peers for flag in range(number)]
            return {region: flags}

        return expected

    def _push(self, num_comm_sms: int, num_chunks: int) -> ShardPush:
        """Targets and flags of a consumer that sends into the current slot."""
        shards, flags = self.slots["shards"].pointers, self.slots["pushed"].pointers
        return ShardPush(shards, flags, self.slots["consumed"].local, num_comm_sms, num_chunks)

    def _shards(self, rank: int, rows: int) -> torch.Tensor:
        flat = self.slots["shards"].peers[rank]
        return flat[: self.num_ranks * rows * self._K].view(self.num_ranks * rows, self._K)
