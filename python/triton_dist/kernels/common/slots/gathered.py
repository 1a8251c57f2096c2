"""All-gather that overlaps with its consumer, a GEMM kernel that waits for a flag per chunk.

Each rank copies its shard of rows into a buffer on every peer, in chunks, and sets a flag after
each chunk. Calls alternate between two slots by the protocol of ``slots/epochs.py``. The transfer
uses no SM: a copy engine moves the data. A flag is an 8-byte copy of this rank's flag word (epoch
and call tag), which follows its data on the same stream. Source and target of a flag must be on
different GPUs. The driver may run a copy within one GPU on an SM, and a full grid that waits for
the flag would never release an SM.

In a fused method, the consumer kernel also sends this rank's shard. It uses the same slots and
protocol, and checks itself that peers have consumed the slot (``gemm/sharded.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.peers import Disagreements, GatheredShards, ShardPush
from triton_dist.kernels.common.slots import epochs
from triton_dist.kernels.common.slots.epochs import AwaitedFlags, EpochSlots, SlotMemory
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, InputRows, SetFlag, Step
from triton_dist.runtime.launch import BoundedDict, Launch

MAX_CHUNKS = 8
"""Maximum number of chunks of a shard: along its rows, or along K in a fused method."""
MAX_COMM_SMS = 32
"""Maximum number of programs of a consumer kernel that send."""
_PUSHED_FLAGS = MAX_CHUNKS * MAX_COMM_SMS  # per source rank
_GAVE_UP = epochs.GAVE_UP


class AllGatherMethod(enum.Enum):
    """Method of an all-gather.

    With copy engines, a rank receives the shards of rank + 1, rank + 2, … in this order.
    """

    FULL_MESH_PUSH = "full_mesh_push"
    """Every rank copies its shard to each peer directly."""
    RING_PUSH_1D = "ring_push_1d"
    """Every rank forwards shards to rank - 1; for hosts whose GPUs are linked in a ring."""
    FUSED_PUSH = "fused_push"
    """A few programs of the consumer's grid copy the shard to all peers, in chunks along K.

    For small shards, because it needs neither a copy engine nor a second launch.
    """
    SERIAL = "serial"
    """A kernel gathers all shards, then ``torch.matmul`` runs, without overlap.

    For few rows, where the transfer takes less time than the overhead of overlapping.
    """

    __repr__ = enum.Enum.__str__

    @property
    def is_fused(self) -> bool:
        """True if the consumer kernel sends the shard, instead of copy engines."""
        return self is AllGatherMethod.FUSED_PUSH

    @property
    def uses_copy_engines(self) -> bool:
        """True if copy engines send the shard while the consumer kernel runs."""
        return self not in (AllGatherMethod.FUSED_PUSH, AllGatherMethod.SERIAL)


@dataclass(frozen=True)
class GatherSlot:
    """Addresses of one slot of an all-gather buffer on all ranks, for the copies of rank ``rank``.

    Attributes:
        rows: rows of a shard.
        shards: by rank, the buffer [num_ranks * rows, K] on that rank.
        arrivals: by rank, the flags on that rank.
        epoch: [1], this rank's flag word, the source of its flags. A ring forwards the flag that
            arrived with the chunk, because this flag contains the call tag of the chunk's origin.
        forward_flags: by rank, flags that allow a copy stream on that rank to forward a chunk of a
            ring.
        flag_one: [1], contains 1.
        scales: by rank, the scales [num_ranks * scales of a shard] of an fp8 A on that rank; empty
            for other dtypes.
    """

    rank: int
    num_ranks: int
    rows: int
    shards: Sequence[torch.Tensor]
    arrivals: Sequence[torch.Tensor]
    epoch: torch.Tensor
    forward_flags: Sequence[torch.Tensor]
    flag_one: torch.Tensor
    scales: Sequence[torch.Tensor] = ()

    def copies_of_scales(
        self, stream: int, chunk: int, num_streams: int, shard: int, peer: int
    ) -> Iterator[Copy]:
        """Yield the copy of a shard's scales to ``peer``, on each stream before the stream's first
        flag.

        A consumer may wait for any chunk first. On each stream, scales therefore precede all
        chunks.
        """
        if self.scales and chunk < num_streams:
            scales_per_shard = len(self.scales[peer]) // self.num_ranks
            shard_slice = slice(shard * scales_per_shard, (shard + 1) * scales_per_shard)
            yield Copy(stream, self.scales[peer][shard_slice], self.scales[self.rank][shard_slice])


def rows_per_chunk(rows: int, num_chunks: int) -> int:
    """Return the rows per chunk of a shard of ``rows`` rows that has ``num_chunks`` chunks."""
    return max(1, -(-rows // num_chunks))


def schedule(
    slot: GatherSlot, method: AllGatherMethod, num_streams: int, num_chunks: int
) -> tuple[Step, ...]:
    """Return the copy-engine steps that rank ``slot.rank`` queues on ``num_streams`` streams."""
    make_steps = _push_ring_steps if method is AllGatherMethod.RING_PUSH_1D else _push_steps
    return tuple(make_steps(slot, num_streams, num_chunks))


def _chunks(
    slot: GatherSlot, step: int, num_streams: int, num_chunks: int
) -> Iterator[tuple[int, ...]]:
    """Yield (stream, chunk, first row, end row) of the shard that is queued in step ``step``."""
    chunk_rows = rows_per_chunk(slot.rows, num_chunks)
    starts = range(0, slot.rows, chunk_rows)
    for chunk, first in enumerate(starts):
        stream = (step * len(starts) + chunk) % num_streams
        yield stream, chunk, first, min(first + chunk_rows, slot.rows)


def _push_steps(slot: GatherSlot, num_streams: int, num_chunks: int) -> Iterator[Step]:
    for step in range(1, slot.num_ranks):
        peer = (slot.rank - step) % slot.num_ranks
        for stream, chunk, first, end in _chunks(slot, step, num_streams, num_chunks):
            begin = slot.rank * slot.rows
            flag = slot.rank * MAX_CHUNKS + chunk
            target = slot.shards[peer][begin + first : begin + end]
            yield from slot.copies_of_scales(stream, chunk, num_streams, slot.rank, peer)
            yield Copy(stream, target, InputRows(first, end))
            yield Copy(stream, slot.arrivals[peer][flag : flag + 1], slot.epoch)


def _push_ring_steps(slot: GatherSlot, num_streams: int, num_chunks: int) -> Iterator[Step]:
    neighbour = (slot.rank - 1) % slot.num_ranks
    for step in range(slot.num_ranks - 1):
        shard = (slot.rank + step) % slot.num_ranks
        for stream, chunk, first, end in _chunks(slot, step, num_streams, num_chunks):
            rows = slice(shard * slot.rows + first, shard * slot.rows + end)
            flag = shard * MAX_CHUNKS + chunk
            # This is another rank's shard. Wait until it has arrived, and reset the flag.
            if step > 0:
                yield AwaitFlag(stream, slot.forward_flags[slot.rank], flag, 1)
                yield SetFlag(stream, slot.forward_flags[slot.rank], flag, 0)
            yield from slot.copies_of_scales(stream, chunk, num_streams, shard, neighbour)
            source = InputRows(first, end) if step == 0 else slot.shards[slot.rank][rows]
            value = slot.epoch if step == 0 else slot.arrivals[slot.rank][flag : flag + 1]
            yield Copy(stream, slot.shards[neighbour][rows], source)
            yield Copy(stream, slot.arrivals[neighbour][flag : flag + 1], value)
            if step < slot.num_ranks - 2:  # The neighbour forwards this chunk.
                yield Copy(stream, slot.forward_flags[neighbour][flag : flag + 1], slot.flag_one)


@jit(do_not_specialize=["num_flags"])
def kernel_release_copies(epoch_ptr, forward_ptr, num_flags):
    """If a wait of a kernel gave up, release the copy streams that wait for chunks. Grid (1,)."""
    if tl.load(epoch_ptr + _GAVE_UP) != 0:
        flag = 0
        while flag < num_flags:
            tl.store(forward_ptr + flag, 1)
            flag += 1


@dataclass(frozen=True)
class _PreparedGather:
    """Prepared all-gather of one shape and method in one slot.

    Attributes:
        gathered: rows and flags that the consumer kernel reads.
        awaited_flags: function that returns the flags that the kernels wait for.
        transfer: prepared copies; ``None`` if the consumer kernel sends.
        is_forwarding: whether copies wait for data from peers, as in a ring.
    """

    gathered: GatheredShards
    awaited_flags: AwaitedFlags
    transfer: Any = None
    is_forwarding: bool = False


class AllGatherBuffer(SlotMemory):
    """Double-buffered symmetric memory for all-gathers of up to ``max_M`` rows of ``K`` elements.

    Creation is collective. Each slot has on each rank:
        shards [max_M * K] of ``dtype``: the gathered rows, written by peers.
        arrivals int64 [source rank, MAX_CHUNKS]: flags of the chunks, written by peers.
        pushed int64 [source rank, sending program, chunk]: flags of fused methods.
        forward int32 [source rank, MAX_CHUNKS]: flags of chunks to forward in a ring; set by the
            neighbour, reset by this rank's copy engines.
        scales fp32 [source rank, scales of a shard]: scales of an fp8 A, written by peers. A copy
            engine reads this rank's scales from here, because transfers have fixed sources.
    ``workspace`` [max_M, K] exists once and is for the caller; no transfer uses it. ``max_scales``
    is the maximum number of scales of all shards together. ``describe_tag`` converts a call tag (a
    number that must be equal on all ranks) to the text in errors.
    """

    def __init__(
        self,
        max_M: int,
        K: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        name: str,
        max_scales: int = 0,
        describe_tag: Callable[[int], object] = int,
    ) -> None:
        num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        flags = {
            "arrivals": ((num_ranks * MAX_CHUNKS,), torch.int64),
            "pushed": ((num_ranks * _PUSHED_FLAGS,), torch.int64),
            "forward": ((num_ranks * MAX_CHUNKS,), torch.int32),
        }
        scales = {"scales": ((max_scales,), torch.float32)} if max_scales else {}
        slots = EpochSlots(
            name,
            {"shards": ((max_M * K,), dtype), **scales, **flags},
            tuple(flags),
            "a kernel of the all-gather or its consumer",
            group,
            single_regions={"workspace": ((max_M, K), dtype)},
            disagreements=Disagreements(f"the rows of A in {name}", group, describe_tag),
            flags_per_rank={"arrivals": MAX_CHUNKS, "pushed": _PUSHED_FLAGS},
        )
        super().__init__(slots)
        self.workspace = self.slots.memory["workspace"].local
        self._K, self._max_scales = K, max_scales
        self._device = self.slots.device
        self._flag_one = torch.ones(1, dtype=torch.int32, device=self._device.torch_device)
        self._streams: list[Any] = [self._device.copy_stream()]
        self._gathered: BoundedDict[Any, GatheredShards] = BoundedDict()
        self._prepared_gathers: BoundedDict[Any, _PreparedGather] = BoundedDict()
        self._started_gather: _PreparedGather | None = None
        self._device.synchronize()  # Later calls may use any stream.

    def start(
        self,
        local_shard: torch.Tensor,
        method: AllGatherMethod,
        num_streams: int,
        num_chunks: int,
        scales: torch.Tensor | None = None,
        call_tag: int | None = None,
    ) -> GatheredShards:
        """Queue the all-gather of ``local_shard`` [rows, K], contiguous. The caller queues the
        consumer kernel next.

        ``scales`` of the shard, fp32, 1-D, arrive before its flags. ``call_tag`` must be equal on
        all ranks; default: the number of rows.
        """
        if not method.uses_copy_engines:
            expected = "a method that uses copy engines; for fused methods call start_fused"
            raise InvalidArgument("start", "method", method, expected)
        rows = local_shard.shape[0]
        self.slots.take(rows if call_tag is None else call_tag, copies_flag_word=True)
        if self.num_ranks == 1:
            return self.gathered_shards(rows, num_chunks)
        num_scales = 0 if scales is None else len(scales)
        key = (self.slots.index, rows, method, num_streams, num_chunks, num_scales)
        prepared = self._prepared_gathers.get(key)
        if prepared is None:
            prepared = self._prepared_gathers[key] = self._prepare(
                rows, method, num_streams, num_chunks, num_scales
            )
        if scales is not None:
            shard_slice = slice(self.rank * num_scales, (self.rank + 1) * num_scales)
            self.slots["scales"].local[shard_slice].copy_(scales)
        self._started_gather = prepared
        prepared.transfer.start(local_shard, self._device.current_stream())
        return prepared.gathered

    def start_fused(self, rows: int, num_comm_sms: int, num_chunks: int) -> GatheredShards:
        """Begin an all-gather of ``rows`` rows per rank. The next launch, of ``sharded_gemm``,
        sends the rows."""
        self.slots.take(rows, peer_check=False)
        key = (self.slots.index, rows, num_comm_sms, num_chunks)
        prepared = self._prepared_gathers.get(key)
        if prepared is None:
            gathered = self.gathered_shards(rows, num_chunks, num_comm_sms)
            flags = num_comm_sms * num_chunks
            prepared = self._prepared_gathers[key] = _PreparedGather(
                gathered, self._awaited_flags_fn("pushed", flags, _PUSHED_FLAGS)
            )
        self._started_gather = prepared
        return prepared.gathered

    def gathered_shards(self, rows: int, num_chunks: int, num_comm_sms: int = 0) -> GatheredShards:
        """Return the rows and flags that a consumer kernel reads in the current slot.

        A shard has ``rows`` rows. If ``num_comm_sms`` is positive, this number of the consumer's
        programs send this rank's shard, and the result contains their target addresses.
        """
        key = (self.slots.index, rows, num_chunks, num_comm_sms)
        gathered = self._gathered.get(key)
        if gathered is None:
            gathered = self._gathered[key] = GatheredShards(
                self._shards(self.rank, rows),
                self.slots["pushed" if num_comm_sms else "arrivals"].local,
                self.slots.epoch,
                rows_per_chunk(rows, 1 if num_comm_sms else num_chunks),
                _PUSHED_FLAGS if num_comm_sms else MAX_CHUNKS,
                self._shard_push(num_comm_sms, num_chunks) if num_comm_sms else None,
                self.slots["scales"].local if self._max_scales else None,
            )
        return gathered

    def finish(self, has_awaited_peers: bool = False) -> None:
        """Queue the end of the all-gather, after its consumer kernel.

        ``has_awaited_peers``: whether the queued consumer waits for every chunk of every peer. The
        next call then needs no peer check.
        """
        prepared, self._started_gather = self._started_gather, None
        if prepared is None:  # a single rank
            return
        if prepared.transfer is not None:
            if prepared.is_forwarding:
                # If a wait gave up, a copy stream may wait for a chunk that will not arrive. The
                # current stream would then wait forever for this copy stream.
                self._release_copies()
            prepared.transfer.join(self._device.current_stream())
        self.slots.finish(has_awaited_peers, prepared.awaited_flags)

    def reset(self) -> None:
        # If the call failed before its end, no kernel has released the waiting copy streams.
        forward = [
            self.slots.region_of_slot(slot, "forward").local for slot in range(epochs.NUM_SLOTS)
        ]
        self._device.run_on_side_stream(lambda: [flags.fill_(1) for flags in forward])
        super().reset()

    def free(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._gathered.clear()
        self._prepared_gathers.clear()
        super().free()

    def _release_copies(self) -> None:
        def launch() -> Launch:
            forward = self.slots["forward"].local
            arguments = (self.slots.epoch, forward, forward.numel())
            return Launch(kernel_release_copies, (1,), arguments, {"num_warps": 1})

        self.slots.launcher.run((kernel_release_copies, self.slots.index), launch)

    def _prepare(
        self, rows: int, method: AllGatherMethod, num_streams: int, num_chunks: int, num_scales: int
    ) -> _PreparedGather:
        """Prepare the all-gather of shards of ``rows`` rows in the current slot by copy engines."""
        while len(self._streams) < num_streams:
            self._streams.append(self._device.copy_stream())
        slot = GatherSlot(
            self.rank,
            self.num_ranks,
            rows,
            [self._shards(rank, rows) for rank in range(self.num_ranks)],
            self.slots["arrivals"].peers,
            self.slots.epoch[:1],
            self.slots["forward"].peers,
            self._flag_one,
            [each[: self.num_ranks * num_scales] for each in self.slots["scales"].peers]
            if num_scales
            else (),
        )
        steps = schedule(slot, method, num_streams, num_chunks)
        gathered = self.gathered_shards(rows, num_chunks)
        is_forwarding = method is AllGatherMethod.RING_PUSH_1D
        if is_forwarding:
            # Load the kernel now. Later, loading may wait for the device, while the device's copies
            # wait for this kernel (a ring with a missing rank hung, 4 H200).
            self._release_copies()
        return _PreparedGather(
            gathered,
            self._awaited_flags_fn("arrivals", -(-rows // gathered.chunk_rows), MAX_CHUNKS),
            self._device.transfer(steps, self._streams[:num_streams]),
            is_forwarding=is_forwarding,
        )

    def _awaited_flags_fn(self, region: str, num_flags: int, flags_per_rank: int) -> AwaitedFlags:
        """Return a function that returns the indices of each peer's first ``num_flags`` flags."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]

        def awaited_flags() -> dict[str, list[int]]:
            flags = [peer * flags_per_rank + flag for peer in peers for flag in range(num_flags)]
            return {region: flags}

        return awaited_flags

    def _shard_push(self, num_comm_sms: int, num_chunks: int) -> ShardPush:
        shards, flags = self.slots["shards"].pointers, self.slots["pushed"].pointers
        return ShardPush(shards, flags, self.slots["consumed"].local, num_comm_sms, num_chunks)

    def _shards(self, rank: int, rows: int) -> torch.Tensor:
        flat = self.slots["shards"].peers[rank]
        return flat[: self.num_ranks * rows * self._K].view(self.num_ranks * rows, self._K)
