"""Report to the host that ranks came to a call with different sizes, say rows of A.

Kernels compare (``kernels/common/flags.py``). The first that finds a difference writes it to the
guard of its memory, and sets a control word in the memory of the host. All waits with that guard
end then, at this and any later call, so nothing hangs, and what such calls compute is of no use.
The host reads its word, which takes no time, before it launches anything and after it, and raises.
The device is waited for only once the word is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.errors import RankDisagreement
from triton_dist.kernels.common.flags import size_in
from triton_dist.runtime.device import current_device

# Control words of a guard, int64 (``language.wait``).
MOST_POLLS, GAVE_UP, SEEN, AWAITED, FLAG, REPORT, GUARD_WORDS = range(7)
DISAGREED = 2

Flags: TypeAlias = tuple[torch.Tensor, Callable[[int], int]]
"""Flags that peers set, and the rank that sets the flag of some index."""


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
        self._noted: list[Callable[[], RankDisagreement | None]] = []

    def add(self, noted: Callable[[], RankDisagreement | None]) -> None:
        """Add a memory. ``noted``: called once the device is done; the disagreement that is noted
        in its guard."""
        self._noted.append(noted)

    def check(self) -> None:
        """Raise if a kernel has found that ranks disagree; some tens of ns otherwise.

        Raises:
            RankDisagreement: until the context is reset.
        """
        if self.word[0]:
            self._raise()

    def check_when_done(self) -> None:
        """The same, once the device has done what is queued."""
        self._device.synchronize(knobs.wait_timeout.get())
        self.check()

    def clear(self) -> None:
        """Forget what was reported: the memories are reset."""
        self.word[0] = 0

    def of(self, rank: int, guard: Sequence[int], flags: Iterable[Flags]) -> RankDisagreement:
        """The error of rank ``rank`` of the group, whose ``guard`` says that one of ``flags`` came
        with another size."""
        own, others = size_in(guard[AWAITED]), size_in(guard[SEEN])
        by_rank: dict[int, object] = {self._of_world(rank): own}
        for words, source_of in flags:
            index, rest = divmod(guard[FLAG] - words.data_ptr(), words.element_size())
            if rest == 0 and 0 <= index < words.numel():
                by_rank[self._of_world(source_of(index))] = others
        remedy = (
            "All ranks must come with the same. The result of the call is not to be used, and the "
            "context not before all ranks have called its reset()."
        )
        return RankDisagreement(self._what, dict(sorted(by_rank.items())), remedy)

    def _of_world(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def _raise(self) -> None:
        if self._device.is_capturing():  # what is found then is an earlier call's; told after it
            return
        self._device.synchronize(knobs.wait_timeout.get())
        for noted in self._noted:
            found = noted()
            if found is not None:
                raise found
