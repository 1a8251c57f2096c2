"""All-gather producers: they bring every rank's shard into a local buffer and set a flag for each
chunk.

No producer here uses an SM for data: copies go to a copy engine, and a flag is a 4-byte copy that
follows its data on the same stream. In a fused method the consumer is the producer, too, in the
same slots and by the same protocol; it looks at its peers itself (``common/fused_push.py``).

Protocol, per slot (a buffer is double: calls alternate between two slots):

* The *epoch* of a slot is the number of its present use. It lives in device memory and ``finish``
  advances it, so a captured CUDA graph counts on at each replay. A chunk has arrived when its flag
  has reached the epoch, so flags are never reset.
* ``finish`` tells every peer that this rank has *consumed* its shards, then advances the epoch. One
  block on the main stream, after the consumer and the own copies.
* New shards may be written to a peer's slot once the peer has consumed the slot's last ones. In
  calls that take turns nobody has to look: this rank's last consumer waited for a shard of each
  peer, a peer's shards of that call were sent after its consumer before, and that was the last to
  read this slot. Only a call of which the host cannot know that it follows such a call on the other
  slot looks at the flags first, by a block before the consumer: in and after CUDA graphs, which
  repeat one slot at each replay, while candidates are tried, and after a call that waited for less.
  (That block is no side stream's: it might never get an SM beside a full grid that waits for it.)

Flags are copied from device memory: in a push from this rank's epoch, in a pull from the owner's
``staged`` epoch, which stands until its next pull in this slot. So flag writes need no SM and no
value baked into a graph. All ranks must make the same sequence of calls, and replay graphs equally
often; the calls of one buffer follow one another on the device, whatever streams they are made on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.errors import InvalidArgument, WaitTimeout
from triton_dist.kernels.common.gemm_launch import GatheredShards, ShardPush
from triton_dist.kernels.common.launch import Launch, Launcher
from triton_dist.kernels.nvidia import epochs
from triton_dist.kernels.nvidia.allgather_schedules import (
    MAX_CHUNKS as MAX_CHUNKS,
)
from triton_dist.kernels.nvidia.allgather_schedules import (
    MAX_COMM_SMS as MAX_COMM_SMS,
)
from triton_dist.kernels.nvidia.allgather_schedules import (
    AllGatherMethod as AllGatherMethod,
)
from triton_dist.kernels.nvidia.allgather_schedules import (
    Slot,
    rows_of_chunk,
    schedule,
)
from triton_dist.kernels.nvidia.epochs import kernel_await_consumption, kernel_finish_epoch
from triton_dist.runtime import symmetric, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for

T = TypeVar("T")

_SLOTS, _LINE, _LAUNCH_SECONDS = epochs.SLOTS, epochs.LINE, epochs.LAUNCH_SECONDS
_PUSHED_FLAGS = MAX_CHUNKS * MAX_COMM_SMS  # of a rank
# Words of a slot's "epoch" line.
_EPOCH, _MOST_POLLS = epochs.EPOCH, epochs.MOST_POLLS
_GAVE_UP, _STAGED, _SOUND = epochs.GAVE_UP, tl.constexpr(3), epochs.SOUND
# Plans of calls that are kept; a plan takes a few KB.
_MOST_PLANS = 4096


@jit(do_not_specialize=["rank", "num_ranks", "offset"])
def kernel_exchange_staged(epoch_ptr, staged_ptr, staged_table, offset, rank, num_ranks):
    """Tell every peer that the own shard is staged, and wait until theirs are. Grid (1,)."""
    epoch = tl.load(epoch_ptr)
    tl.store(epoch_ptr + _STAGED, epoch)
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            dl.notify(dl.symm_at(staged_ptr, staged_table, peer) + offset + rank, epoch)
        peer += 1
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            dl.wait(staged_ptr + offset + peer, 1, epoch, epoch_ptr + 1)
        peer += 1


@jit(do_not_specialize=["num_flags"])
def kernel_release_copies(epoch_ptr, forward_ptr, num_flags):
    """If a wait of the call gave up, let copy streams hand on what has not come. Grid (1,)."""
    if tl.load(epoch_ptr + _GAVE_UP) != 0:
        flag = 0
        while flag < num_flags:
            tl.store(forward_ptr + flag, 1)
            flag += 1


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
                "pushed": ((_SLOTS, self.num_ranks * _PUSHED_FLAGS), torch.int32),
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
        self._streams: list[Any] = [self._device.copy_stream()]
        self._launcher = Launcher()
        self._gathered: dict[Any, GatheredShards] = {}
        shards, pushed = self._memory["shards"], self._memory["pushed"]
        self._tables = [
            [each.pointers + slot * each.local[0].nbytes for each in (shards, pushed)]
            for slot in range(_SLOTS)
        ]
        self._transfers: dict[Any, Any] = {}
        self._pending: Any = None
        self._hands_on = False
        self._slot = 0
        # Flags of each peer that a slot's consumer waits for: their region, number, and distance.
        self._flags_in_use = [("arrivals", 0, MAX_CHUNKS)] * _SLOTS
        self._most_polls = 0
        self._in_turn = self._in_graphs = self._capturing = False
        self._memory["epoch"].local[:, _EPOCH] = 1
        self._device.synchronize()

    def start(
        self, own: torch.Tensor, method: AllGatherMethod, num_streams: int, num_chunks: int
    ) -> GatheredShards:
        """Queue the all-gather of ``own`` [rows, K], contiguous; the caller queues the consumer
        next."""
        if method.is_fused:
            raise InvalidArgument("start", "method", method, "a copy engine's; see start_fused")
        self._take_slot()
        rows = own.shape[0]
        gathered = self.describe(rows, num_chunks)
        if self.num_ranks == 1:
            return gathered
        if method is AllGatherMethod.FULL_MESH_PULL:
            gathered.rows[self.rank * rows : (self.rank + 1) * rows].copy_(own.detach())
            self._tell(kernel_exchange_staged, "staged")
        key = (self._slot, rows, method, num_streams, num_chunks)
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._plan(rows, method, num_streams, num_chunks)
            self._transfers[key] = transfer
        self._pending = transfer
        self._hands_on = method is AllGatherMethod.RING_PUSH_1D
        self._flags_in_use[self._slot] = "arrivals", -(-rows // gathered.chunk_rows), MAX_CHUNKS
        transfer.start(own, self._device.current_stream())
        return gathered

    def start_fused(self, rows: int, num_comm_sms: int, num_chunks: int) -> GatheredShards:
        """Begin an all-gather of ``rows`` rows of each rank that the consumer does, which the
        caller queues next: a launch of ``sharded_gemm``."""
        self._take_slot(look=False)
        self._flags_in_use[self._slot] = "pushed", num_comm_sms * num_chunks, _PUSHED_FLAGS
        return self.describe(rows, num_chunks, num_comm_sms)

    def beside(self, call: Callable[[], T]) -> T:
        """``call()``, which gathers in memory of its own.

        While candidates are tried, an eager call of our own begins with a look at the peers, which
        it does not need later, when it follows another. ``call`` gets the same before it: else it
        would be ahead by a kernel's launch, which is a lot where M is small. What else our own
        calls do, they do in production too.
        """
        most_polls = waits.limit_polls()
        if self.num_ranks == 1 or not most_polls or self._device.is_capturing():
            return call()
        self._bound_waits(most_polls)
        self._look_at_peers((self._slot + 1) % _SLOTS)  # it stays the next call's
        result = call()
        self._see_to_waits()
        return result

    def describe(self, rows: int, num_chunks: int, num_comm_sms: int = 0) -> GatheredShards:
        """What a consumer of shards of ``rows`` rows reads in the current slot; with
        ``num_comm_sms``, where so many of its programs send the own shard."""
        key = (self._slot, rows, num_chunks, num_comm_sms)
        known = self._gathered.get(key)
        if known is None:
            if len(self._gathered) >= _MOST_PLANS:
                self._gathered.clear()
                self._transfers.clear()
            known = self._gathered[key] = GatheredShards(
                self._shards(self.rank, rows),
                self._memory["pushed" if num_comm_sms else "arrivals"].local[self._slot],
                self._memory["epoch"].local[self._slot],
                rows_of_chunk(rows, 1 if num_comm_sms else num_chunks),
                _PUSHED_FLAGS if num_comm_sms else MAX_CHUNKS,
                self._push(num_comm_sms, num_chunks) if num_comm_sms else None,
            )
        return known

    def _push(self, num_comm_sms: int, num_chunks: int) -> ShardPush:
        """How a consumer sends into the current slot."""
        shards, flags = self._tables[self._slot]
        consumed = self._memory["consumed"].local[self._slot]
        return ShardPush(shards, flags, consumed, num_comm_sms, num_chunks)

    def finish(self, awaited: bool = False) -> None:
        """Queue the end of the all-gather after its consumer: own copies are out, peers may go
        on.

        ``awaited``: the consumer is queued and waits for every chunk of every peer; then the next
        call can begin without a look at the peers.
        """
        if self.num_ranks == 1:
            return
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if self._most_polls and self._hands_on:
                # A copy stream may wait for what will not come, and the join would for it.
                self._release_copies()
            pending.join(self._device.current_stream())
        self._tell(kernel_finish_epoch, "consumed")
        self._in_turn = awaited and not self._capturing and not self._most_polls
        if self._most_polls:
            self._see_to_waits()

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        # Where the consumer was never launched, nobody gave up on what a copy stream waits for.
        self._device.aside(lambda: self._memory["forward"].local.fill_(1))
        self._device.synchronize(waits.limit_seconds())
        self._ranks.barrier("no rank uses the all-gather buffer")
        for flags in ("arrivals", "pushed", "consumed", "staged", "forward", "epoch"):
            self._memory[flags].local.zero_()
        self._memory["epoch"].local[:, _EPOCH] = 1
        self._slot = self._most_polls = 0
        self._in_turn = False
        self._device.synchronize()
        self._ranks.barrier("all-gather flags are reset")

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._gathered.clear()
        self._transfers.clear()
        self._memory.free()

    def _take_slot(self, look: bool = True) -> None:
        """Go on to the other slot; queue a look at the peers where the host does not know that they
        are done with it. No ``look``: the consumer does so itself."""
        self._slot = (self._slot + 1) % _SLOTS
        if self.num_ranks == 1:
            return
        most_polls = waits.limit_polls()
        self._bound_waits(most_polls)
        self._capturing = self._device.is_capturing()
        if self._capturing and not most_polls:  # graphs of trials are not replayed after the trials
            self._in_graphs = True
        if look and (self._in_graphs or most_polls or not self._in_turn):
            self._look_at_peers(self._slot)
        self._in_turn = False

    def _look_at_peers(self, slot: int) -> None:
        """Queue a wait until every peer is done with ``slot``."""

        def launch() -> Launch:
            epoch, consumed = (self._memory[name].local[slot] for name in ("epoch", "consumed"))
            arguments = (epoch, consumed, self.rank, self.num_ranks)
            return Launch(kernel_await_consumption, (1,), arguments, {"num_warps": 1})

        self._launcher.run((kernel_await_consumption, slot), launch)

    def _release_copies(self) -> None:
        def launch() -> Launch:
            epoch, forward = (self._memory[each].local[self._slot] for each in ("epoch", "forward"))
            arguments = (epoch, forward, forward.numel())
            return Launch(kernel_release_copies, (1,), arguments, {"num_warps": 1})

        self._launcher.run((kernel_release_copies, self._slot), launch)

    def _tell(self, kernel: Any, flags: str) -> None:
        """Launch ``kernel``, which sets this rank's flag in the region ``flags`` of each peer."""

        def launch() -> Launch:
            region = self._memory[flags]
            arguments = (
                self._memory["epoch"].local[self._slot],
                region.local,
                region.pointers,
                self._slot * region.local.shape[1],
                self.rank,
                self.num_ranks,
            )
            return Launch(kernel, (1,), arguments, {"num_warps": 1})

        self._launcher.run((kernel, self._slot), launch)

    def _plan(self, rows: int, method: AllGatherMethod, num_streams: int, num_chunks: int) -> Any:
        """The transfer of shards of ``rows`` rows in the current slot."""
        while len(self._streams) < num_streams:
            self._streams.append(self._device.copy_stream())
        slot = Slot(
            self.rank,
            self.num_ranks,
            rows,
            [self._shards(rank, rows) for rank in range(self.num_ranks)],
            [peer[self._slot] for peer in self._memory["arrivals"].peers],
            self._memory["epoch"].local[self._slot, :1],
            [
                peer[self._slot, _STAGED.value : _STAGED.value + 1]
                for peer in self._memory["epoch"].peers
            ],
            [peer[self._slot] for peer in self._memory["forward"].peers],
            self._one,
        )
        steps = schedule(slot, method, num_streams, num_chunks)
        return self._device.transfer(steps, self._streams[:num_streams])

    def _bound_waits(self, most_polls: int) -> None:
        if most_polls != self._most_polls:
            lines = self._memory["epoch"].local
            if not self._most_polls:
                lines[:, _GAVE_UP.value] = 0  # in trials before these, after which nobody looked
            lines[:, _MOST_POLLS] = most_polls
            self._most_polls = most_polls

    def _see_to_waits(self) -> None:
        """While candidates are tried: leave it to the tuner to look whether a wait gave up, or look
        now, and raise ``WaitTimeout``, if nobody will."""
        if waits.leave(self._gave_up) or self._device.is_capturing():
            return
        # The begin kernel, the exchange of a pull and the consumer may each wait for the limit.
        self._device.synchronize(3 * (waits.limit_seconds() or 0.0) + _LAUNCH_SECONDS)
        overdue = self._gave_up()
        if overdue is not None:
            raise overdue

    def _gave_up(self) -> WaitTimeout | None:
        """Once the device is done: the error of the first call, since this was last asked, of which
        a wait gave up."""
        if not self._streams:  # freed
            return None
        lines = self._memory["epoch"].local
        seen = lines.tolist()
        oldest_first = [(self._slot + 1 + number) % _SLOTS for number in range(_SLOTS)]
        slot = next((each for each in oldest_first if seen[each][_GAVE_UP.value]), None)
        if slot is None:
            return None
        epoch = seen[slot][_SOUND.value] + 1
        staged = seen[slot][_STAGED.value] == epoch
        flag, value = self._overdue(slot, epoch, staged)
        lines[:, _GAVE_UP.value] = 0
        lines[:, _SOUND.value] = lines[:, _EPOCH] - 1
        return WaitTimeout(
            rank=self.rank,
            program="a kernel of the all-gather or its consumer",
            flag=flag,
            expected=epoch,
            seen=value,
            seconds=waits.limit_seconds() or 0.0,
        )

    def _overdue(self, slot: int, epoch: int, staged: bool) -> tuple[str, int]:
        """The first flag of ``slot`` that has not reached ``epoch``, and its value; of a pull, for
        which this rank has ``staged``, also what says that peers have."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        region, number, distance = self._flags_in_use[slot]
        waited_for = {
            region: [peer * distance + flag for peer in peers for flag in range(number)],
            "staged": peers if staged else [],
            "consumed": peers,
        }
        for region, indices in waited_for.items():
            flags = self._memory[region].local[slot]
            expected = epoch - (region == "consumed")
            for index in indices:
                if int(flags[index]) < expected:
                    return describe_address(flags[index].data_ptr()), int(flags[index])
        return "which has arrived since", epoch

    def _shards(self, rank: int, rows: int) -> torch.Tensor:
        flat = self._memory["shards"].peers[rank][self._slot]
        return flat[: self.num_ranks * rows * self._K].view(self.num_ranks * rows, self._K)
