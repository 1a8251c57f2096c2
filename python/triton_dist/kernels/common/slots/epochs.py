"""Double-buffered symmetric memory whose uses are counted by epochs.

The two buffers are called slots, and calls alternate between them. The protocol of a slot:

* The *epoch* of a slot counts its uses. It is in device memory and ``finish`` increments it, so
  replays of a CUDA graph continue the count. A sender sets a flag to the epoch, and the receiver
  waits until the flag has reached the epoch. Flags are therefore never reset.
* ``finish`` queues a kernel of one program on the main stream, after the call's kernels and copies.
  The kernel reports to every peer that this rank has *consumed* the received data. Then it
  increments the epoch.
* A sender may overwrite a peer's slot once the peer has consumed the previous contents. Alternating
  calls guarantee this without a check. Call n uses the slot of call n - 2. On this rank, call n - 1
  waited for data from each peer, which each peer sent only after its own call n - 2 had ended.
* If the host cannot prove this order, the call begins with a *peer check*: a kernel of one program
  that waits until every peer has consumed the slot. Three kinds of calls need it: calls in CUDA
  graphs (a replay repeats one slot) and all calls after them, calls during tuning, and calls after
  a call that did not wait for all peers. The check runs on the main stream. On a side stream it
  might never get an SM, because a full grid that waits for the check may occupy all SMs.

All ranks must make the same sequence of calls and replay graphs equally often. The calls of one
``EpochSlots`` must execute in order on the device, even if they use several streams.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.debugging import rank_status
from triton_dist.kernels.common.peers import (
    FIRST_TIMEOUT_WORD,
    TIMEOUT_WORDS,
    Disagreements,
    Flags,
    TimeoutWords,
    current_flag,
    epoch_at,
    flag_count,
    flag_value,
    timeout_words_at,
)
from triton_dist.kernels.common.peers import GAVE_UP as _GAVE_UP
from triton_dist.language.signals import CALL_TAG_BITS
from triton_dist.runtime import symmetric, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import Step
from triton_dist.runtime.garbage import weak_method
from triton_dist.runtime.launch import BoundedDict, Launch, Launcher
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric import Region

T = TypeVar("T")

NUM_SLOTS = 2
_WORDS_PER_LINE = 16  # int64 words in a 128-byte line; each slot has its own line
# Control words of a slot, in the region "epoch". The first is the flag of the slot's current use:
# the epoch, and the call tag (``take``) of the last call with a peer check. Timeout words follow.
FLAG_WORD, _FIRST_TIMEOUT_WORD = 0, FIRST_TIMEOUT_WORD.value
GAVE_UP = tl.constexpr(_FIRST_TIMEOUT_WORD + _GAVE_UP)
LAST_COMPLETE_EPOCH = tl.constexpr(
    _FIRST_TIMEOUT_WORD + TIMEOUT_WORDS
)  # last epoch before a wait gave up
_ONE_EPOCH = tl.constexpr(flag_value(1, 0))
# The peer check and two kernels of the op may each wait until the limit.
_CONSECUTIVE_WAITS = 3

Regions: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each region, by name."""
AwaitedFlags: TypeAlias = Callable[[], Mapping[str, Iterable[int]]]
"""Function that returns the indices of the flags that a call's kernels wait for, by region."""


@jit(do_not_specialize=["call_tag", "rank", "num_ranks"])
def kernel_await_consumption(epoch_ptr, consumed_ptr, call_tag, rank, num_ranks):
    """Wait until every peer has consumed the data of the slot's last use. Grid (1,).

    Also store ``call_tag`` in the slot's flag word, which copy engines copy to the peers.
    """
    last_epoch = (epoch_at(epoch_ptr) - 1).to(tl.int32)
    tl.store(epoch_ptr, current_flag(epoch_ptr, call_tag))
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            dl.wait(consumed_ptr + peer, 1, last_epoch, timeout_words_at(epoch_ptr))
        peer += 1


@jit(do_not_specialize=["rank", "num_ranks"])
def kernel_finish_epoch(epoch_ptr, consumed_ptr, consumed_table, rank, num_ranks):
    """Report to every peer that its data is consumed, and increment the slot's epoch. Grid (1,)."""
    flag = tl.load(epoch_ptr)
    epoch = epoch_at(epoch_ptr)
    peer = 0
    while peer < num_ranks:
        if peer != rank:
            consumed = dl.symm_at(consumed_ptr, consumed_table, peer) + rank
            dl.notify(consumed, epoch.to(tl.int32))
        peer += 1
    # After a wait gave up, keep LAST_COMPLETE_EPOCH. The error message then names the flag of this
    # wait.
    tl.store(epoch_ptr + LAST_COMPLETE_EPOCH, epoch, mask=tl.load(epoch_ptr + GAVE_UP) == 0)
    tl.store(epoch_ptr, flag + _ONE_EPOCH)


class EpochSlots:
    """Two slots of named symmetric regions. Creation is collective.

    Each slot also has ``consumed`` int32 [num_ranks]: each peer writes the last epoch that it has
    consumed. ``epoch`` int64 [slots, 16] holds each slot's flag word and timeout words.

    Args:
        name, waiting_kernels: names of the memory and of the kernels that wait for its flags, for
            errors.
        regions: regions of each slot.
        zeroed: regions that are zero initially and after ``reset``, such as flags and sums.
        single_regions: regions that exist once instead of once per slot.
        disagreements: collects calls with different call tags. Pass one object to all memories of a
            context; by default this memory has its own.
        flags_per_rank: by region, the number of consecutive flags that one peer sets. Default: the
            last dimension of a region is the source rank.
    """

    def __init__(
        self,
        name: str,
        regions: Regions,
        zeroed: tuple[str, ...],
        waiting_kernels: str,
        group: dist.ProcessGroup | None,
        single_regions: Regions | None = None,
        disagreements: Disagreements | None = None,
        flags_per_rank: Mapping[str, int] | None = None,
    ) -> None:
        ranks = group_for(group)
        self.rank, self.num_ranks = ranks.rank, ranks.size
        self.device = current_device()
        self.launcher = Launcher()
        self.index = 0
        self._zeroed = (*zeroed, "consumed")
        slot_regions = {**regions, "consumed": ((self.num_ranks,), torch.int32)}
        self.memory = symmetric.allocate(
            name,
            {
                **(single_regions or {}),
                **{
                    f"{each}{slot}": slot_regions[each]
                    for each in slot_regions
                    for slot in range(NUM_SLOTS)
                },
                "epoch": ((NUM_SLOTS, _WORDS_PER_LINE), torch.int64),
            },
            group,
        )
        self.disagreements = disagreements or Disagreements(f"the size of a call of {name}", group)
        self._flags_per_rank = dict(flags_per_rank or {})
        self._call_tags = [0] * NUM_SLOTS
        self._awaited_flags: list[AwaitedFlags] = [dict] * NUM_SLOTS
        self._num_begun_calls = [0] * NUM_SLOTS  # calls begun per slot, for the rank status
        self._previous_awaited_all = self._in_graphs = self._capturing = False
        self._clear_control_words()
        flags = weak_method(self._flags)
        self.timeout_words = TimeoutWords(
            name, waiting_kernels, self.memory["epoch"].local, _FIRST_TIMEOUT_WORD,
            _CONSECUTIVE_WAITS, weak_method(self._find_late_flag), flags, self.disagreements, ranks,
        )  # fmt: skip
        # Load now: loading waits for running kernels, so a later load could deadlock with a kernel
        # that waits for a peer (see Launch.preload).
        if self.num_ranks > 1:
            self._peer_check_launch(0).preload(self._finish_launch()).compile()
        self.device.synchronize()
        self._status = rank_status.SlotStatus(
            self.memory["epoch"],
            FLAG_WORD,
            CALL_TAG_BITS.value,
            self._num_begun_calls,
            weak_method(self._late_flags),
            flags,
        )
        self._reports_status = rank_status.add(self._status)

    def __getitem__(self, region: str) -> Region:
        return self.region_of_slot(self.index, region)

    def region_of_slot(self, slot: int, region: str) -> Region:
        return self.memory[f"{region}{slot}"]

    @property
    def next_index(self) -> int:
        """Slot of the next call."""
        return (self.index + 1) % NUM_SLOTS

    @property
    def epoch(self) -> torch.Tensor:
        """int64 control words of the current slot: its flag word, then its timeout words."""
        return self.control_words_of_slot(self.index)

    def control_words_of_slot(self, slot: int) -> torch.Tensor:
        return self.memory["epoch"].local[slot]

    def take(
        self, call_tag: int = 0, peer_check: bool = True, copies_flag_word: bool = False
    ) -> None:
        """Switch to the other slot, and queue a peer check if peers may still use it.

        Args:
            call_tag: number that must be equal on all ranks, such as the number of rows.
            peer_check: ``False`` if the call's kernel checks its peers itself.
            copies_flag_word: ``True`` if copy engines copy the slot's flag word to the peers. A
                changed call tag then requires a peer check, which stores the tag in this word.

        Raises:
            RankDisagreement: ranks made an earlier call with different call tags.
        """
        self.index = self.next_index
        if self.num_ranks == 1:
            return
        self._num_begun_calls[self.index] += 1
        max_polls = self.timeout_words.begin_call()
        self._capturing = self.device.is_capturing()
        if self._capturing and not max_polls:  # graphs of tuning are not replayed later
            self._in_graphs = True
        # If the previous call, on the other slot, waited for every peer, no peer check is needed.
        may_still_be_read = self._in_graphs or max_polls or not self._previous_awaited_all
        if peer_check and (
            may_still_be_read or (copies_flag_word and self._call_tags[self.index] != call_tag)
        ):
            self._check_peers(self.index, call_tag)
        self._previous_awaited_all = False

    def skip(self) -> None:
        """Switch to the other slot without incrementing an epoch.

        Use this method for a call that synchronises ranks itself.
        """
        self.index = self.next_index

    def finish(self, has_awaited_peers: bool = False, awaited_flags: AwaitedFlags = dict) -> None:
        """Queue the end of a call: report consumption to the peers and increment the epoch.

        The current stream must already wait for the call's side streams.

        Args:
            has_awaited_peers: ``True`` if the call waits for data that every peer sends in this
                call. The next call then needs no peer check.
            awaited_flags: flags that the call's kernels wait for; called only for an error.

        Raises:
            RankDisagreement, WaitTimeout: see ``TimeoutWords.end_call``.
        """
        if self.num_ranks == 1:
            return
        self.launcher.run((kernel_finish_epoch, self.index), self._finish_launch)
        max_polls = self.timeout_words.max_polls
        self._previous_awaited_all = has_awaited_peers and not self._capturing and not max_polls
        if max_polls or self._reports_status:
            self._awaited_flags[self.index] = awaited_flags
        self.timeout_words.end_call()

    def run_without_slots(self, call: Callable[[], T]) -> T:
        """Return the result of ``call()``, which does not use this memory (a library algorithm).

        During tuning, calls that use slots begin with a peer check, which production calls skip. To
        give all candidates the same overhead, queue a peer check before ``call`` too.
        """
        self.disagreements.check()
        if self.num_ranks == 1 or not waits.limit_polls() or self.device.is_capturing():
            return call()
        self.timeout_words.begin_call()
        slot = self.next_index  # the next call still uses this slot
        self._check_peers(slot, self._call_tags[slot])
        result = call()
        self.timeout_words.check_waits()
        return result

    def reset(self) -> None:
        with self.timeout_words.resetting():
            for region in self._zeroed:
                for slot in range(NUM_SLOTS):
                    self.region_of_slot(slot, region).local.zero_()
            self._clear_control_words()
            self._call_tags = [0] * NUM_SLOTS
            self._num_begun_calls[:] = [0] * NUM_SLOTS
            self.index = 0
            self._previous_awaited_all = False

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self.timeout_words.free()
        self.memory.free()

    def _clear_control_words(self) -> None:
        control_lines = self.memory["epoch"].local
        control_lines.zero_()
        control_lines[:, FLAG_WORD] = flag_value(1, 0)

    def _check_peers(self, slot: int, call_tag: int) -> None:
        """Queue the peer check of ``slot``, which also stores ``call_tag`` in its flag word."""
        self._call_tags[slot] = call_tag
        self.launcher.run(
            (kernel_await_consumption, slot, call_tag),
            lambda: self._peer_check_launch(slot, call_tag),
        )

    def _peer_check_launch(self, slot: int, call_tag: int = 0) -> Launch:
        consumed = self.region_of_slot(slot, "consumed").local
        arguments = (
            self.control_words_of_slot(slot),
            consumed,
            call_tag,
            self.rank,
            self.num_ranks,
        )
        return Launch(kernel_await_consumption, (1,), arguments, {"num_warps": 1})

    def _finish_launch(self) -> Launch:
        consumed = self["consumed"]
        arguments = (self.epoch, consumed.local, consumed.pointers, self.rank, self.num_ranks)
        return Launch(kernel_finish_epoch, (1,), arguments, {"num_warps": 1})

    def _flags(self, slot: int) -> list[Flags]:
        return [self._flags_in(slot, region) for region in self._zeroed]

    def _flags_in(self, slot: int, region: str) -> Flags:
        flags_per_rank = self._flags_per_rank.get(region)
        words = self.region_of_slot(slot, region).local
        if flags_per_rank is None:
            return words, lambda index: index % self.num_ranks
        return words, lambda index: index // flags_per_rank

    def _find_late_flag(self, gave_up: Mapping[int, Sequence[int]]) -> tuple[str, int, int]:
        """Return the first late flag of the oldest call that gave up, the awaited epoch, and the
        flag's epoch."""
        oldest_first = ((self.index + 1 + number) % NUM_SLOTS for number in range(NUM_SLOTS))
        slot = next(each for each in oldest_first if each in gave_up)
        epoch = gave_up[slot][LAST_COMPLETE_EPOCH.value - _FIRST_TIMEOUT_WORD] + 1
        control_lines = self.memory["epoch"].local
        control_lines[:, LAST_COMPLETE_EPOCH.value] = (
            control_lines[:, FLAG_WORD] >> CALL_TAG_BITS.value
        ) - 1
        for flag in self._late_flags(slot, epoch, torch.Tensor.cpu):
            return flag["flag"], epoch, flag["seen"]
        return "(it has arrived since)", epoch, epoch

    def _late_flags(
        self, slot: int, epoch: int, read: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> Iterator[dict[str, Any]]:
        """Yield the flags that have not reached ``epoch``, for which this use of the slot waits."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        for region, indices, value in (
            *((region, indices, epoch) for region, indices in self._awaited_flags[slot]().items()),
            ("consumed", peers, epoch - 1),
        ):
            flags, source_of = self._flags_in(slot, region)
            host_flags = read(flags)
            seen = [] if host_flags is None else host_flags.view(-1).tolist()
            if flags.dtype == torch.int64:
                seen = [flag_count(flag) for flag in seen]
            for index in indices:
                if index < len(seen) and seen[index] < value:
                    address = flags.data_ptr() + index * flags.element_size()
                    late_flag = {"flag": describe_address(address), "writer": source_of(index)}
                    yield late_flag | {"expected": value, "seen": seen[index]}


class SlotMemory:
    """Base class of memories that consist of ``EpochSlots``."""

    def __init__(self, slots: EpochSlots) -> None:
        self.slots = slots
        self.rank, self.num_ranks = slots.rank, slots.num_ranks
        self.disagreements = slots.disagreements

    def flags_of_peers(self, num_flags: int) -> list[int]:
        """Return the indices of each peer's flags in a region [``num_flags``, source rank]."""
        indices = range(num_flags * self.num_ranks)
        return [index for index in indices if index % self.num_ranks != self.rank]

    def reset(self) -> None:
        self.slots.reset()

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self.slots.free()


PUSH_STREAMS = 2  # two, because each stream fills the gaps between the copies of the other stream


class PushedSlots(SlotMemory):
    """Slots to which copy engines of the peers push shards."""

    def __init__(self, slots: EpochSlots) -> None:
        super().__init__(slots)
        self._device = current_device()
        self._streams: list[Any] = [self._device.copy_stream() for _ in range(PUSH_STREAMS)]
        self._transfers: BoundedDict[Any, Any] = BoundedDict()

    def transfer(self, key: Hashable, steps: Callable[[], Iterable[Step]]) -> Any:
        """Return the transfer for ``key``, which is built from ``steps()`` the first time."""
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = self._device.transfer(list(steps()), self._streams)
        return transfer

    def free(self) -> None:
        for stream in self._streams:
            stream.close()
        self._streams.clear()
        self._transfers.clear()
        super().free()
