"""Knowledge about peers: their memory, the flags that they set, their shards, and guards of waits.

Addresses of peers' memory are read from tables. A flag of a call carries its size, so that who
waits for a peer also learns whether the peer came with as many rows: it is int64, which call it is
of, above, and the size in the lowest 20 bits (``language.sized``). Whoever waits for it compares
both: two integer operations, and no access to memory more. The size in it is of the call that set
it, whatever the peer has done since.

*Guards.* In production a wait takes as long as it takes. While candidates are tried it gives up
after some polls (``runtime/waits.py``), writes that to the guard of its memory, and ends all waits
of that guard.

Ranks may come to a call with different sizes, say rows of A. The first kernel that finds a
difference writes it to the guard of its memory, and sets a control word in the memory of the host.
All waits with guards of the context, which form a ring, end then, at this and any later call: so
nothing hangs, and the results of such calls are not to be used. The host reads its word, which
takes no time, before and after each launch, and raises. It waits for the device only once the word
is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import triton.language as tl

from triton_dist import knobs
from triton_dist._jit import jit
from triton_dist.errors import RankDisagreement, WaitTimeout
from triton_dist.language.signals import SIZE_BITS, sized
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import ProcessGroupRanks, SoloRank

# Bytes of which every target is a multiple. The compiler knows nothing of an address from a table;
# without this it stores 2 bytes at a time.
TARGET_ALIGNMENT = tl.constexpr(16)
# Word of a slot's line at which the guard begins, after the epoch.
TIMEOUT_WORD = tl.constexpr(1)
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
def timeout_word_of(epoch_ptr):
    """The guard of the waits in a slot whose line begins at ``epoch_ptr`` (``slots/epochs.py``)."""
    return epoch_ptr + TIMEOUT_WORD


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
    """Memory that a consumer needs to send this rank's shard itself (``gemm/work_items.py``).

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


# Control words of a guard, int64 (``language.wait``).
MOST_POLLS, GAVE_UP, SEEN, AWAITED, FLAG, REPORT, NEXT, TIMEOUT_WORDS = range(8)
DISAGREED = 2

Flags: TypeAlias = tuple[torch.Tensor, Callable[[int], int]]
"""Flags that peers set, and the rank that sets the flag of some index."""
# Beside the waits themselves, the longest that a call's kernels take, compiling not counted.
_LAUNCH_SECONDS = 10.0


class Disagreements:
    """Disagreements that kernels noted in the memories of one context.

    Args:
        what: of which ranks come with the same number, for errors.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None) -> None:
        self._what, self._group = what, group
        self._device = current_device()
        memory = self._device.host_word()
        self.address = memory.data_ptr()
        self.word = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy has the protocol
        # Weak: guards refer to this object, and to memory that is to go with its owner.
        self._timeouts: WeakValueDictionary[int, TimeoutWord] = WeakValueDictionary()

    def add(self, timeout_words: TimeoutWord) -> None:
        """Add the guards of a memory to the ring."""
        self._timeouts[id(timeout_words)] = timeout_words
        self.link()

    def link(self) -> None:
        """Write to each guard where the next of the ring is, and where to report."""
        each = [
            words for timeout_words in self._timeouts.values() for words in timeout_words.of_slots()
        ]
        for words, following in zip(each, each[1:] + each[:1], strict=True):
            words[REPORT], words[NEXT] = self.address, following.data_ptr()

    def noted(self) -> RankDisagreement | None:
        """Once the device is done: the disagreement that is noted in one of the guards."""
        return next(
            filter(
                None, (timeout_words.disagreement() for timeout_words in self._timeouts.values())
            ),
            None,
        )

    def check(self) -> None:
        """Raise if a kernel has found that ranks disagree; some tens of ns otherwise.

        Raises:
            RankDisagreement: until the context is reset.
        """
        if self.word[0]:
            if self._device.is_capturing():  # an earlier call's error: raised after the capture
                return
            self._device.synchronize(knobs.wait_timeout.get())
            found = self.noted()
            if found is not None:
                raise found

    def check_when_done(self) -> None:
        """The same, once the device has done what is queued."""
        self._device.synchronize(knobs.wait_timeout.get())
        self.check()

    def clear(self) -> None:
        """Forget what was reported: the memories are reset."""
        self.word[0] = 0

    def of(
        self, rank: int, timeout_words: Sequence[int], flags: Iterable[Flags]
    ) -> RankDisagreement:
        """The error of rank ``rank`` of the group, whose ``timeout_words`` says that one of
        ``flags`` came with another size."""
        own, others = size_in(timeout_words[AWAITED]), size_in(timeout_words[SEEN])
        by_rank: dict[int, object] = {self._of_world(rank): own}
        for words, source_of in flags:
            index, rest = divmod(timeout_words[FLAG] - words.data_ptr(), words.element_size())
            if rest == 0 and 0 <= index < words.numel():
                by_rank[self._of_world(source_of(index))] = others
        remedy = (
            "All ranks must come with the same. The result of the call is not to be used, and the "
            "context not before all ranks have called its reset()."
        )
        return RankDisagreement(self._what, dict(sorted(by_rank.items())), remedy)

    def _of_world(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


Late: TypeAlias = Callable[[Mapping[int, Sequence[int]]], tuple[str, int, int]]
"""Asked once a wait gave up, with the guards of the slots where one did: the name of the flag that
is late, what was awaited there, and what is there."""


@dataclass(eq=False)
class TimeoutWord:
    """The guards of a memory's slots, as the host sees them.

    name, kernels: of the memory, and of what waits in it, for errors.
    lines: int64 [slots, control words], with a guard from word ``first`` on. The host writes its
    limit and the addresses at the end, kernels the words in between.
    waits_in_a_row: how many waits of a call may each last until the limit.
    flags: of a slot, the flags that carry sizes. found: the disagreements of the context.
    """

    name: str
    kernels: str
    lines: torch.Tensor
    first: int
    waits_in_a_row: int
    late: Late
    flags: Callable[[int], Iterable[Flags]]
    found: Disagreements
    ranks: ProcessGroupRanks | SoloRank
    most_polls: int = 0

    def __post_init__(self) -> None:
        self._device, self._word = current_device(), self.found.word
        self.found.add(self)

    def begin(self) -> int:
        """Limit the waits of the call that comes; returns the limit in polls, 0: none.

        Raises:
            RankDisagreement: ranks have come to an earlier call with different sizes.
        """
        if self._word[0]:
            self.found.check()
        most_polls = waits.limit_polls()
        if most_polls != self.most_polls:
            if not self.most_polls:
                self._clear()  # what trials before these left, after which nobody asked
            self.lines[:, self.first + MOST_POLLS] = most_polls
            self.most_polls = most_polls
        return most_polls

    def end(self) -> None:
        """Look after the waits of a call that is queued.

        Raises:
            RankDisagreement: ranks have come with different sizes; of a GPU, told by a later call.
            WaitTimeout: while candidates are tried, when a wait of this call gave up and nobody
                settles such things later.
        """
        if self.most_polls:
            self.see_to_waits()
        if self._word[0]:
            self.found.check()

    def see_to_waits(self) -> None:
        """While candidates are tried: leave it to the tuner to ask whether a wait gave up, or ask
        now, and raise ``WaitTimeout``, if nobody will."""
        if waits.leave(self.gave_up) or self._device.is_capturing():
            return
        limit = waits.limit_seconds() or 0.0
        self._device.synchronize(self.waits_in_a_row * limit + _LAUNCH_SECONDS)
        overdue = self.gave_up()
        if overdue is not None:
            raise overdue

    def gave_up(self) -> WaitTimeout | RankDisagreement | None:
        """Once the device is done: the error of the first call, since this was last asked, of which
        a wait gave up."""
        late = {
            slot: timeout_words
            for slot, timeout_words in enumerate(self._timeouts())
            if timeout_words[GAVE_UP]
        }
        if not late:
            return None
        disagreed = self.found.noted()
        if disagreed is not None:
            return disagreed
        flag, expected, seen = self.late(late)
        self._clear()
        return WaitTimeout(
            rank=self.ranks.rank,
            program=self.kernels,
            flag=flag,
            expected=expected,
            seen=seen,
            seconds=waits.limit_seconds() or 0.0,
        )

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Within, no rank uses the memory: all fill it with what it held at first. Collective."""
        self._device.synchronize(waits.limit_seconds())
        self.ranks.barrier(f"no rank uses the memory of {self.name}")
        yield
        self.found.link()
        self.found.clear()
        self.most_polls = 0
        self._device.synchronize()
        self.ranks.barrier(f"the flags of {self.name} are reset")

    def free(self) -> None:
        """Let go of the memory: from now on no wait has given up."""
        self.lines = torch.empty(0, self.lines.shape[1])

    def of_slots(self) -> Iterable[torch.Tensor]:
        """The guard of each slot, int64 [control words]."""
        return self.lines[:, self.first :]

    def disagreement(self) -> RankDisagreement | None:
        """Once the device is done: the sizes of the present calls, if a peer's is another one."""
        for slot, timeout_words in enumerate(self._timeouts()):
            if timeout_words[GAVE_UP] == DISAGREED:
                return self.found.of(self.ranks.rank, timeout_words, self.flags(slot))
        return None

    def _timeouts(self) -> list[list[int]]:
        return [line[self.first :] for line in self.lines.tolist()]

    def _clear(self) -> None:
        self.lines[:, self.first + GAVE_UP : self.first + REPORT] = 0
