"""Double-buffered symmetric memory that counts its uses: what calls of an op take turns with.

The protocol is that of the all-gather (``allgather.py`` says why it is right): a slot has an epoch
in device memory, flags are set to it and never reset, and at its end a call tells the peers that
this rank has consumed what they wrote. Only a call of which the host cannot know that its peers are
done with the slot looks before it begins: in and after CUDA graphs, while candidates are tried, and
after a call whose kernels did not wait for something of every peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist

from triton_dist.errors import WaitTimeout
from triton_dist.kernels.common.launch import Launch, Launcher
from triton_dist.kernels.nvidia.allgather import kernel_await_consumption, kernel_finish_epoch
from triton_dist.runtime import symmetric, waits
from triton_dist.runtime.addresses import describe_address
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.symmetric import Region

T = TypeVar("T")

_SLOTS = 2
_LINE = 32  # int32 in a cache line
# Words of a slot's "epoch" line; words 1 and 2 are the guard of its waits (language.wait).
_EPOCH, _MOST_POLLS, _GAVE_UP = 0, 1, 2
# Beside the waits themselves, the longest that a call's kernels take, compiling not counted.
_LAUNCH_SECONDS = 10.0


class EpochSlots:
    """Two slots of named symmetric regions. Creation is collective.

    Args:
        name: says in errors whose memory it is.
        regions: shape and dtype of each region of a slot.
        zeroed: those of them that ``reset`` fills with zero, as they are at first: flags, sums.
        kernels: what waits for flags in them, for errors.
    """

    def __init__(
        self,
        name: str,
        regions: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        zeroed: tuple[str, ...],
        kernels: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._ranks = group_for(group)
        self.rank, self.num_ranks = self._ranks.rank, self._ranks.size
        self.device = current_device()
        self.launcher = Launcher()
        self.index = 0
        self._name, self._zeroed, self._kernels = name, zeroed, kernels
        words = -(-self.num_ranks // _LINE) * _LINE
        self.memory = symmetric.allocate(
            name,
            {
                f"{region}{slot}": layout
                for region, layout in regions.items()
                for slot in range(_SLOTS)
            }
            | {
                "consumed": ((_SLOTS, words), torch.int32),
                "epoch": ((_SLOTS, _LINE), torch.int32),
            },
            group,
        )
        self._most_polls = 0
        self._in_turn = self._in_graphs = self._capturing = False
        self.memory["epoch"].local[:, _EPOCH] = 1
        self.device.synchronize()

    def __getitem__(self, region: str) -> Region:
        """A region of the current slot."""
        return self.memory[f"{region}{self.index}"]

    @property
    def epoch(self) -> torch.Tensor:
        """int32 of the current slot: its epoch, then the guard of its waits."""
        return self.memory["epoch"].local[self.index]

    def take(self) -> None:
        """Go on to the other slot; queue a look at the peers where the host does not know that they
        are done with it."""
        self.index = (self.index + 1) % _SLOTS
        if self.num_ranks == 1:
            return
        most_polls = waits.limit_polls()
        if most_polls != self._most_polls:
            self.memory["epoch"].local[:, _MOST_POLLS] = most_polls
            self._most_polls = most_polls
        self._capturing = self.device.is_capturing()
        if self._capturing and not most_polls:  # graphs of trials are not replayed after the trials
            self._in_graphs = True
        if self._in_graphs or most_polls or not self._in_turn:
            consumed = self.memory["consumed"].local[self.index]
            self.launcher.run(
                (kernel_await_consumption, self.index),
                lambda: Launch(
                    kernel_await_consumption,
                    (1,),
                    (self.epoch, consumed, self.rank, self.num_ranks),
                    {"num_warps": 1},
                ),
            )
        self._in_turn = False

    def finish(
        self,
        awaited: bool = False,
        expected: Callable[[], Mapping[str, Iterable[int]]] = dict,
        join: Callable[[], object] | None = None,
        release: Callable[[], object] | None = None,
    ) -> None:
        """Queue the end of a call: tell the peers that the slot is consumed, advance its epoch.

        Args:
            awaited: what was queued waits for something of every peer, which the peer sends in the
                same call; then the next call can begin without a look at the peers.
            expected: which int32 flags of which regions the call's kernels wait for, for errors.
            join: lets the current stream wait for side streams of the call.
            release: called first when a wait gave up: frees side streams that wait likewise.

        Raises:
            WaitTimeout: while candidates are tried, when a wait of this call gave up.
        """
        if self.num_ranks == 1:
            return
        overdue: WaitTimeout | None = None
        if self._most_polls and not self._capturing:
            overdue = self._gave_up(expected)
            if overdue is not None and release is not None:
                release()
        if join is not None:
            join()
        region = self.memory["consumed"]
        offset = self.index * region.local.shape[1]
        self.launcher.run(
            (kernel_finish_epoch, self.index),
            lambda: Launch(
                kernel_finish_epoch,
                (1,),
                (self.epoch, region.local, region.pointers, offset, self.rank, self.num_ranks),
                {"num_warps": 1},
            ),
        )
        self._in_turn = awaited and not self._capturing and not self._most_polls
        if overdue is not None:
            raise overdue

    def beside(self, call: Callable[[], T]) -> T:
        """``call()``, which uses none of this memory. While candidates are tried, it pays for what
        an eager call of our own pays for then: the look at the peers, and the host's wait."""
        if not waits.limit_polls() or self.device.is_capturing():
            return call()
        self.take()
        try:
            return call()
        finally:
            self.finish()

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        self.device.synchronize(waits.limit_seconds())
        self._ranks.barrier(f"no rank uses the memory of {self._name}")
        for region in ("consumed", "epoch"):
            self.memory[region].local.zero_()
        for region in self._zeroed:
            for slot in range(_SLOTS):
                self.memory[f"{region}{slot}"].local.zero_()
        self.memory["epoch"].local[:, _EPOCH] = 1
        self.index = self._most_polls = 0
        self._in_turn = False
        self.device.synchronize()
        self._ranks.barrier(f"the flags of {self._name} are reset")

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self.memory.free()

    def _gave_up(self, expected: Callable[[], Mapping[str, Iterable[int]]]) -> WaitTimeout | None:
        """While candidates are tried: the error of this call, if one of its waits gave up."""
        limit = waits.limit_seconds() or 0.0
        # The look at the peers and two kernels of the op may each wait for the limit.
        self.device.synchronize(3 * limit + _LAUNCH_SECONDS)
        line = self.epoch.tolist()
        if not line[_GAVE_UP]:
            return None
        self.memory["epoch"].local[:, _GAVE_UP] = 0
        flag, seen = self._overdue(line[_EPOCH], expected())
        return WaitTimeout(
            rank=self.rank,
            program=self._kernels,
            flag=flag,
            expected=line[_EPOCH],
            seen=seen,
            seconds=limit,
        )

    def _overdue(self, epoch: int, expected: Mapping[str, Iterable[int]]) -> tuple[str, int]:
        """The first flag of the slot that has not reached ``epoch``, and its value."""
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        consumed = self.memory["consumed"].local[self.index]
        for flags, indices, value in (
            *((self[name].local, indices, epoch) for name, indices in expected.items()),
            (consumed, peers, epoch - 1),
        ):
            seen = flags.tolist()
            for index in indices:
                if seen[index] < value:
                    address = flags.data_ptr() + index * flags.element_size()
                    return describe_address(address), seen[index]
        return "which has arrived since", epoch
