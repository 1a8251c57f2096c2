"""All-gather producers: they bring every rank's shard into a local buffer and set a flag for each
chunk.

A consumer kernel reads a shard as soon as its flags are there. No producer uses an SM for data:
copies go to a copy engine, and a flag is a 4-byte copy that follows its data on the same stream.

Protocol, per slot (a buffer is double: calls alternate between two slots):

* The *epoch* of a slot counts its uses. It lives in device memory and is advanced by a kernel, so a
  captured CUDA graph counts on at each replay. A chunk has arrived when its flag has reached the
  epoch, so flags are never reset.
* ``begin`` waits until every peer has *consumed* the slot's last epoch, which was two calls ago;
  only then may new shards be written to peers. It runs on the main stream before the consumer: a
  one-block kernel on a side stream may never get an SM beside a full grid that waits for it.
* ``finish`` tells every peer that this rank has consumed its shards.

Flags are copied from the epoch word: in a push from this rank's, in a pull from the owner's, which
stands at this epoch until everyone has finished it. So flag writes need no SM and no value baked
into a graph. All ranks must make the same sequence of calls, and replay graphs equally often.
"""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.gemm_launch import GatheredShards
from triton_dist.runtime import symmetric, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

MAX_CHUNKS = 8
_SLOTS = 2
# int32 in a cache line. Slots start on a line of their own, so their pointers are always aligned.
_LINE = 32
# Words of a slot's "epoch" line. The last two are the guard of its waits (language.wait).
_EPOCH, _MOST_POLLS, _GAVE_UP = 0, 1, 2
# Beside the waits themselves, the longest that a call's kernels take, compiling not counted.
_LAUNCH_SECONDS = 10.0


class AllGatherMethod(enum.Enum):
    """How shards travel. In each, this rank receives rank + 1's shard first, then rank + 2's, …"""

    FULL_MESH_PUSH = "full_mesh_push"
    """Every rank copies its shard straight to each peer."""
    FULL_MESH_PULL = "full_mesh_pull"
    """Every rank stages its shard and copies each peer's to itself, after a barrier."""
    RING_PUSH_1D = "ring_push_1d"
    """Every rank hands on to rank - 1 what it has; for links between neighbours only."""

    def __repr__(self) -> str:
        return str(self)


@jit(do_not_specialize=["rank", "num_ranks"])
def kernel_begin_epoch(epoch_ptr, consumed_ptr, rank, num_ranks):
    """Advance the slot's epoch once every peer has consumed the last one. Grid (1,)."""
    last = tl.load(epoch_ptr)
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            dl.wait(consumed_ptr + peer, 1, last, epoch_ptr + 1)
        peer += 1
    tl.store(epoch_ptr, last + 1)


@jit(do_not_specialize=["rank", "num_ranks", "offset"])
def kernel_notify_peers(
    epoch_ptr, flags_ptr, flags_table, offset, rank, num_ranks, WAIT: tl.constexpr
):
    """Set flag ``offset + rank`` of every peer to the slot's epoch; ``WAIT``: and wait for theirs.
    Grid (1,)."""
    epoch = tl.load(epoch_ptr)
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            dl.notify(dl.symm_at(flags_ptr, flags_table, peer) + offset + rank, epoch)
        peer += 1
    if WAIT:
        peer = 0
        while peer < num_ranks:
            if peer != rank:
                dl.wait(flags_ptr + offset + peer, 1, epoch, epoch_ptr + 1)
            peer += 1


def _whole_lines(words: int) -> int:
    return -(-words // _LINE) * _LINE


class AllGatherBuffer:
    """Double-buffered symmetric memory for all-gathers of up to ``max_M`` rows of ``K`` elements.

    ``workspace`` [max_M, K] is allocated along with it and used by no transfer. Creation is
    collective.
    """

    def __init__(
        self, max_M: int, K: int, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str
    ) -> None:
        self._ranks = group_for(group)
        self.rank, self.num_ranks = self._ranks.rank, self._ranks.size
        self._device = current_device()
        flag_words = _whole_lines(self.num_ranks * MAX_CHUNKS)
        rank_words = _whole_lines(self.num_ranks)
        self._memory = symmetric.allocate(
            name,
            {
                "workspace": ((max_M, K), dtype),
                "shards": ((_SLOTS, max_M * K), dtype),
                "arrivals": ((_SLOTS, flag_words), torch.int32),
                "consumed": ((_SLOTS, rank_words), torch.int32),
                "staged": ((_SLOTS, rank_words), torch.int32),
                "forward": ((_SLOTS, flag_words), torch.int32),
                "epoch": ((_SLOTS, _LINE), torch.int32),
            },
            group,
        )
        self.workspace = self._memory["workspace"].local
        self._K = K
        self._one = torch.ones(1, dtype=torch.int32, device=self._device.torch_device)
        self._streams = [self._device.copy_stream()]
        self._slot = 0
        self._streams_in_use = self._chunks_in_use = 0
        self._most_polls = 0

    def start(
        self, own: torch.Tensor, method: AllGatherMethod, num_streams: int, num_chunks: int
    ) -> GatheredShards:
        """Queue the all-gather of ``own`` [rows, K], contiguous; the caller queues the consumer
        next."""
        self._slot = (self._slot + 1) % _SLOTS
        own = own.detach()  # else copies of it would give the buffer a history for autograd
        rows = own.shape[0]
        gathered = self.describe(rows, num_chunks)
        self._bound_waits(waits.limit_polls())
        consumed = self._memory["consumed"].local[self._slot]
        kernel_begin_epoch[(1,)](gathered.epoch, consumed, self.rank, self.num_ranks, num_warps=1)
        chunk_rows = gathered.chunk_rows
        chunks = [(first, min(first + chunk_rows, rows)) for first in range(0, rows, chunk_rows)]
        if method is AllGatherMethod.FULL_MESH_PULL:
            gathered.rows[self.rank * rows : (self.rank + 1) * rows].copy_(own)
            self._notify_peers("staged", wait=True)
        while len(self._streams) < num_streams:
            self._streams.append(self._device.copy_stream())
        for stream in self._streams[:num_streams]:
            stream.after_current()
        queue_copies = {
            AllGatherMethod.FULL_MESH_PUSH: self._push,
            AllGatherMethod.FULL_MESH_PULL: self._pull,
            AllGatherMethod.RING_PUSH_1D: self._push_ring,
        }[method]
        queue_copies(own, chunks, num_streams)
        self._streams_in_use, self._chunks_in_use = num_streams, len(chunks)
        return gathered

    def describe(self, rows: int, num_chunks: int) -> GatheredShards:
        """What a consumer of shards of ``rows`` rows reads in the current slot."""
        return GatheredShards(
            self._shards(self.rank, rows),
            self._memory["arrivals"].local[self._slot],
            self._memory["epoch"].local[self._slot],
            max(1, -(-rows // num_chunks)),
            MAX_CHUNKS,
        )

    def finish(self) -> None:
        """Queue the end of the all-gather after its consumer: own copies are out, peers may go
        on."""
        overdue: WaitTimeout | None = None
        if self._most_polls and not self._device.is_capturing():
            overdue = self._gave_up()
            if overdue is not None:
                # A copy stream may wait for what will not come either, and the join would for it.
                self._memory["forward"].local[self._slot].fill_(1)
        for stream in self._streams[: self._streams_in_use]:
            stream.join_current()
        self._notify_peers("consumed", wait=False)
        if overdue is not None:
            raise overdue

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        self._device.synchronize(waits.limit_seconds())
        self._ranks.barrier("no rank uses the all-gather buffer")
        for flags in ("arrivals", "consumed", "staged", "forward", "epoch"):
            self._memory[flags].local.zero_()
        self._slot = self._most_polls = 0
        self._device.synchronize()
        self._ranks.barrier("all-gather flags are reset")

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._memory.free()

    def _bound_waits(self, most_polls: int) -> None:
        if most_polls != self._most_polls:
            self._memory["epoch"].local[:, _MOST_POLLS] = most_polls
            self._most_polls = most_polls

    def _gave_up(self) -> WaitTimeout | None:
        """While candidates are tried: the error of this call, if one of its waits gave up."""
        limit = waits.limit_seconds() or 0.0
        # The begin kernel, the exchange of a pull and the consumer may each wait for the limit.
        self._device.synchronize(3 * limit + _LAUNCH_SECONDS)
        line = self._memory["epoch"].local[self._slot].tolist()
        if not line[_GAVE_UP]:
            return None
        self._memory["epoch"].local[:, _GAVE_UP] = 0
        flag, seen = self._overdue(line[_EPOCH])
        return WaitTimeout(
            rank=self.rank,
            program="a kernel of the all-gather or its consumer",
            flag=flag,
            expected=line[_EPOCH],
            seen=seen,
            seconds=limit,
        )

    def _overdue(self, epoch: int) -> tuple[str, int]:
        """The first flag of the slot that has not reached ``epoch``, and its value."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        waited_for = {
            "arrivals": [
                peer * MAX_CHUNKS + chunk for peer in peers for chunk in range(self._chunks_in_use)
            ],
            "staged": peers,
            "consumed": peers,
        }
        for region, indices in waited_for.items():
            flags = self._memory[region].local[self._slot]
            for index in indices:
                if int(flags[index]) < epoch:
                    return describe_address(flags[index].data_ptr()), int(flags[index])
        return "which has arrived since", epoch

    def _shards(self, rank: int, rows: int) -> torch.Tensor:
        flat = self._memory["shards"].peers[rank][self._slot]
        return flat[: self.num_ranks * rows * self._K].view(self.num_ranks * rows, self._K)

    def _notify_peers(self, flags: str, wait: bool) -> None:
        region = self._memory[flags]
        kernel_notify_peers[(1,)](
            self._memory["epoch"].local[self._slot],
            region.local,
            region.pointers,
            self._slot * region.local.shape[1],
            self.rank,
            self.num_ranks,
            WAIT=wait,
            num_warps=1,
        )

    def _push(self, own: torch.Tensor, chunks: list[tuple[int, int]], num_streams: int) -> None:
        rows, epoch = own.shape[0], self._memory["epoch"].local[self._slot, :1]
        for step in range(1, self.num_ranks):
            peer = (self.rank - step) % self.num_ranks
            shards, arrivals = (
                self._shards(peer, rows),
                self._memory["arrivals"].peers[peer][self._slot],
            )
            for chunk, (first, end) in enumerate(chunks):
                stream = self._streams[(step * len(chunks) + chunk) % num_streams]
                flag = self.rank * MAX_CHUNKS + chunk
                stream.copy(
                    shards[self.rank * rows + first : self.rank * rows + end], own[first:end]
                )
                stream.copy(arrivals[flag : flag + 1], epoch)

    def _pull(self, own: torch.Tensor, chunks: list[tuple[int, int]], num_streams: int) -> None:
        rows = own.shape[0]
        shards, arrivals = self._shards(self.rank, rows), self._memory["arrivals"].local[self._slot]
        for step in range(1, self.num_ranks):
            peer = (self.rank + step) % self.num_ranks
            source, epoch = (
                self._shards(peer, rows),
                self._memory["epoch"].peers[peer][self._slot, :1],
            )
            for chunk, (first, end) in enumerate(chunks):
                stream = self._streams[(step * len(chunks) + chunk) % num_streams]
                flag = peer * MAX_CHUNKS + chunk
                begin, stop = peer * rows + first, peer * rows + end
                stream.copy(shards[begin:stop], source[begin:stop])
                stream.copy(arrivals[flag : flag + 1], epoch)

    def _push_ring(
        self, own: torch.Tensor, chunks: list[tuple[int, int]], num_streams: int
    ) -> None:
        rows, epoch = own.shape[0], self._memory["epoch"].local[self._slot, :1]
        neighbour = (self.rank - 1) % self.num_ranks
        received, target = self._shards(self.rank, rows), self._shards(neighbour, rows)
        arrivals = self._memory["arrivals"].peers[neighbour][self._slot]
        forward = self._memory["forward"].local[self._slot]
        neighbours_forward = self._memory["forward"].peers[neighbour][self._slot]
        for step in range(self.num_ranks - 1):
            shard = (self.rank + step) % self.num_ranks
            for chunk, (first, end) in enumerate(chunks):
                stream = self._streams[(step * len(chunks) + chunk) % num_streams]
                flag = shard * MAX_CHUNKS + chunk
                begin, stop = shard * rows + first, shard * rows + end
                if step > 0:  # not ours: wait for it; the flag is back at 0 before its next use
                    stream.wait_flag(forward, flag, 1)
                    stream.write_flag(forward, flag, 0)
                stream.copy(
                    target[begin:stop], own[first:end] if step == 0 else received[begin:stop]
                )
                stream.copy(arrivals[flag : flag + 1], epoch)
                if step < self.num_ranks - 2:  # the neighbour hands it on
                    stream.copy(neighbours_forward[flag : flag + 1], self._one)
