"""Memory words with which kernels address peers and wait for them: tables, flags and timeout words.

*Flags* are int64. The lowest 20 bits hold the *call tag* of the call that set the flag: a number
computed from the call's sizes, for example its number of rows. The bits above count calls
(``language.tagged``). A waiting kernel compares the call tag with its own, so it detects a peer
that called with other sizes.

*Timeout words* are control words. An op's symmetric memory has two buffers (slots), each with
its own timeout words. In production a wait has no limit. During tuning, a wait gives up after a
number of polls (``runtime/waits.py``). It records this in the timeout words, which ends all waits
that use them.

*Disagreements*: a kernel that sees another call tag records it in its timeout words and sets a word
in host memory. All timeout words of a context form a ring, through which the kernel also ends the
other waits of the context, in this call and in later calls. The results of these calls are invalid.
The host reads its word before and after each launch, which takes no device time. If the word is
set, the host waits for the device and raises the error.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
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
from triton_dist.language.signals import CALL_TAG_BITS, tagged
from triton_dist.runtime import waits
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import ProcessGroupRanks, SoloRank

# Alignment of all target addresses in bytes. Without this hint, Triton stores 2 bytes at a time to
# an address that it loaded from a table.
TARGET_ALIGNMENT = tl.constexpr(16)
# The control words of a slot are one 128-byte line: the epoch, then the timeout words from here.
FIRST_TIMEOUT_WORD = tl.constexpr(1)
_TAG_PRIME = 2**20 - 3


@jit
def target_at(targets_ptr, index, like_ptr):
    """Return entry ``index`` of a table of target addresses, with the type of ``like_ptr``.

    The alignment hint must be here: Triton 3.6 loses a hint on the result of an inlined call.
    """
    return tl.multiple_of(tl.load(targets_ptr + index).to(like_ptr.dtype), TARGET_ALIGNMENT)


@jit
def epoch_at(epoch_ptr):
    """Return the epoch of the slot whose control words begin at ``epoch_ptr``."""
    return tl.load(epoch_ptr) >> CALL_TAG_BITS


@jit
def timeout_words_at(epoch_ptr):
    """Return the timeout words of the slot whose control words begin at ``epoch_ptr``."""
    return epoch_ptr + FIRST_TIMEOUT_WORD


@jit
def current_flag(epoch_ptr, call_tag):
    """Return the flag that a call with ``call_tag`` sets and awaits in the slot's current use."""
    return tagged(epoch_at(epoch_ptr), call_tag)


def flag_tag(flag: int) -> int:
    """Return the lowest 20 bits of a flag, its call tag, on the host."""
    mask: int = (1 << CALL_TAG_BITS.value) - 1
    return flag & mask


def flag_count(flag: int) -> int:
    tag_bits: int = CALL_TAG_BITS.value
    return flag >> tag_bits


def flag_value(count: int, call_tag: int) -> int:
    """Compute ``language.tagged`` on the host: an int64 that wraps around as on the device."""
    tag_bits: int = CALL_TAG_BITS.value
    flag = (count << tag_bits | flag_tag(call_tag)) % 2**64
    return flag - 2**64 if flag >= 2**63 else flag


def fold_to_tag(number: int) -> int:
    """Fold an element count or a checksum into a call tag of 20 bits.

    The divisor is the largest prime below 2**20, because counts tend to differ by powers of two.
    """
    return number % _TAG_PRIME


@functools.lru_cache(4096)
def digest_of(*arguments: Hashable) -> int:
    """Fold arguments that must be equal on all ranks into a call tag."""
    return fold_to_tag(zlib.crc32(repr(arguments).encode()))


@dataclass(frozen=True)
class ShardPush:
    """Memory of a GEMM kernel that sends this rank's shard of A itself (``gemm/sharded.py``).

    Attributes:
        shards, arrivals: int64 [num_ranks], addresses of the gathered rows and flags on each rank.
        consumed: int32 [num_ranks], the last epoch whose shards each peer has consumed.
        num_comm_sms: number of programs that send.
        num_chunks: number of chunks of a shard, along K.
    """

    shards: torch.Tensor
    arrivals: torch.Tensor
    consumed: torch.Tensor
    num_comm_sms: int
    num_chunks: int


@dataclass(frozen=True)
class GatheredShards:
    """The gathered shards, and the flags that report which rows have arrived.

    Flag ``arrivals[s * flags_per_rank + c]`` covers rows ``[c * chunk_rows, (c + 1) * chunk_rows)``
    of shard s. These rows have arrived when the flag reaches ``epoch[0]``. Timeout words follow the
    epoch. If ``push`` is set, the consumer kernel sends this rank's shard, and a flag covers a
    chunk along K.

    Attributes:
        rows: [M, K], contiguous.
        arrivals, epoch: int64, in the flag format of this module.
        scales: fp32, scales of the shards of an fp8 A, in the order of ranks.
    """

    rows: torch.Tensor
    arrivals: torch.Tensor
    epoch: torch.Tensor
    chunk_rows: int
    flags_per_rank: int
    push: ShardPush | None = None
    scales: torch.Tensor | None = None


# Indices of the timeout words, int64 (``language.wait``), and their number, TIMEOUT_WORDS. FLAG,
# HOST_WORD and NEXT_WORDS hold addresses. GAVE_UP is 1 after a timeout, or DISAGREED.
MAX_POLLS, GAVE_UP, SEEN, AWAITED, FLAG, HOST_WORD, NEXT_WORDS, TIMEOUT_WORDS = range(8)
DISAGREED = 2

Flags: TypeAlias = tuple[torch.Tensor, Callable[[int], int]]
"""Flags that peers set, and a function from a flag's index to the rank that sets it."""
# Assumed maximum run time of a call's kernels in seconds, without waits and compilation.
_LAUNCH_SECONDS = 10.0


class Disagreements:
    """Different call tags that kernels have recorded in the memories of one context.

    Args:
        value: description of the value that must be equal on all ranks, for errors.
        describe_tag: converts a call tag to the text in errors.
    """

    def __init__(
        self,
        value: str,
        group: dist.ProcessGroup | None,
        describe_tag: Callable[[int], object] = int,
    ) -> None:
        self._value, self._group, self._describe_tag = value, group, describe_tag
        self._device = current_device()
        memory = self._device.host_word()
        self.host_word_address = memory.data_ptr()
        self.host_word = memoryview(memory.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
        # Weak references, because each TimeoutWords refers to this object: a cycle would delay the
        # release of the memory.
        self._members: WeakValueDictionary[int, TimeoutWords] = WeakValueDictionary()

    def add(self, timeout_words: TimeoutWords) -> None:
        """Add the timeout words of a memory to the ring."""
        self._members[id(timeout_words)] = timeout_words
        self.link()

    def link(self) -> None:
        """Write the address of the next slot's timeout words and of the host word to each slot."""
        all_words = [
            words
            for timeout_words in self._members.values()
            for words in timeout_words.slot_words()
        ]
        for words, following in zip(all_words, all_words[1:] + all_words[:1], strict=True):
            words[HOST_WORD], words[NEXT_WORDS] = self.host_word_address, following.data_ptr()

    def find_error(self) -> RankDisagreement | None:
        """Return the disagreement that a kernel has recorded, if any. Kernels must have ended."""
        errors = (timeout_words.disagreement() for timeout_words in self._members.values())
        return next(filter(None, errors), None)

    def check(self) -> None:
        """Raise if a kernel has recorded a disagreement; otherwise return within some tens of ns.

        Raises:
            RankDisagreement: raised by every call until the context is reset.
        """
        if self.host_word[0]:
            # The error is of a call before the graph capture. Raise it after the capture.
            if self._device.is_capturing():
                return
            self._device.synchronize(knobs.wait_timeout.get())
            found = self.find_error()
            if found is not None:
                raise found

    def check_when_done(self) -> None:
        self._device.synchronize(knobs.wait_timeout.get())
        self.check()

    def clear(self) -> None:
        self.host_word[0] = 0

    def build_error(
        self, rank: int, timeout_words: Sequence[int], flags: Iterable[Flags]
    ) -> RankDisagreement:
        """Return the error for the timeout words of group rank ``rank``.

        ``flags`` are searched for the flag with another call tag, to name the rank that set it.
        """
        own_tag, other_tag = flag_tag(timeout_words[AWAITED]), flag_tag(timeout_words[SEEN])
        by_rank: dict[int, object] = {self._global_rank(rank): self._describe_tag(own_tag)}
        for words, source_of in flags:
            # Find the flag by the address that the kernel has recorded.
            index, rest = divmod(timeout_words[FLAG] - words.data_ptr(), words.element_size())
            if rest == 0 and 0 <= index < words.numel():
                by_rank[self._global_rank(source_of(index))] = self._describe_tag(other_tag)
        remedy = (
            "All ranks must call with the same value. The result of this call is invalid. Call "
            "the context's reset() on all ranks before the next call."
        )
        return RankDisagreement(self._value, dict(sorted(by_rank.items())), remedy)

    def _global_rank(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


FindLateFlag: TypeAlias = Callable[[Mapping[int, Sequence[int]]], tuple[str, int, int]]
"""Function that returns (name, expected value, present value) of the flag that a wait gave up on.

The argument maps each slot in which a wait gave up to the timeout words of the slot.
"""


@dataclass(eq=False)
class TimeoutWords:
    """Host view of the timeout words of a memory's slots.

    Attributes:
        name, waiting_kernels: names of the memory and of the kernels that wait for its flags, for
            errors.
        control_lines: int64 [slots, control words]; the timeout words begin at ``first_word``.
        consecutive_waits: number of waits in one call that can each last until the limit.
        find_late_flag: finds the flag that a wait gave up on, for errors.
        flags: returns the flags of a slot that carry call tags.
        disagreements: object of the context that collects disagreements.
        max_polls: current limit of waits in polls; 0 means no limit.
    """

    name: str
    waiting_kernels: str
    control_lines: torch.Tensor
    first_word: int
    consecutive_waits: int
    find_late_flag: FindLateFlag
    flags: Callable[[int], Iterable[Flags]]
    disagreements: Disagreements
    ranks: ProcessGroupRanks | SoloRank
    max_polls: int = 0

    def __post_init__(self) -> None:
        self._device, self._host_word = current_device(), self.disagreements.host_word
        self.disagreements.add(self)

    def begin_call(self) -> int:
        """Set the limit of waits of the next call and return it in polls; 0 means no limit.

        Raises:
            RankDisagreement: ranks made an earlier call with different sizes.
        """
        if self._host_word[0]:
            self.disagreements.check()
        max_polls = waits.limit_polls()
        if max_polls != self.max_polls:
            if not self.max_polls:
                self._clear()  # Candidates tried earlier may have left values.
            self.control_lines[:, self.first_word + MAX_POLLS] = max_polls
            self.max_polls = max_polls
        return max_polls

    def end_call(self) -> None:
        """Check the waits of a call whose kernels have been queued.

        Raises:
            RankDisagreement: ranks called with different sizes. On a GPU, the error of a call is
                raised by a later call.
            WaitTimeout: a wait gave up during tuning outside of ``waits.deferred_checks``.
        """
        if self.max_polls:
            self.check_waits()
        if self._host_word[0]:
            self.disagreements.check()

    def check_waits(self) -> None:
        """Let the tuner check the waits later, or check them now if it does not defer checks."""
        if waits.defer(self.timeout_error) or self._device.is_capturing():
            return
        limit = waits.limit_seconds() or 0.0
        self._device.synchronize(self.consecutive_waits * limit + _LAUNCH_SECONDS)
        error = self.timeout_error()
        if error is not None:
            raise error

    def timeout_error(self) -> WaitTimeout | RankDisagreement | None:
        """Return the error of the first wait that gave up, if any. All kernels must have ended."""
        late_slots = {
            slot: timeout_words
            for slot, timeout_words in enumerate(self._words_per_slot())
            if timeout_words[GAVE_UP]
        }
        if not late_slots:
            return None
        # A disagreement also ends waits. If there is one, it is the cause.
        disagreed = self.disagreements.find_error()
        if disagreed is not None:
            return disagreed
        flag, expected, seen = self.find_late_flag(late_slots)
        self._clear()
        return WaitTimeout(
            rank=self.ranks.rank,
            program=self.waiting_kernels,
            flag=flag,
            expected=expected,
            seen=seen,
            seconds=waits.limit_seconds() or 0.0,
        )

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Context manager in which no rank uses the memory, so that ranks can reinitialise it.
        Collective."""
        self._device.synchronize(waits.limit_seconds())
        self.ranks.barrier(f"no rank uses the memory of {self.name}")
        yield
        self.disagreements.link()
        self.disagreements.clear()
        self.max_polls = 0
        self._device.synchronize()
        self.ranks.barrier(f"the flags of {self.name} are reset")

    def free(self) -> None:
        """Release the memory; afterwards ``timeout_error`` returns ``None``."""
        self.control_lines = torch.empty(0, self.control_lines.shape[1])

    def slot_words(self) -> Iterable[torch.Tensor]:
        """Return the timeout words of all slots, int64 [slots, words]."""
        return self.control_lines[:, self.first_word :]

    def disagreement(self) -> RankDisagreement | None:
        """Return the error if a peer has another call tag, else ``None``. All kernels must have
        ended."""
        for slot, timeout_words in enumerate(self._words_per_slot()):
            if timeout_words[GAVE_UP] == DISAGREED:
                return self.disagreements.build_error(
                    self.ranks.rank, timeout_words, self.flags(slot)
                )
        return None

    def _words_per_slot(self) -> list[list[int]]:
        return [control_line[self.first_word :] for control_line in self.control_lines.tolist()]

    def _clear(self) -> None:
        self.control_lines[:, self.first_word + GAVE_UP : self.first_word + HOST_WORD] = 0
