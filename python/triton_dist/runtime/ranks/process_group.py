"""The ranks of a torch process group, co-ordinated over its key-value store.

Every word goes over the group's c10d store and has a deadline, so a rank that is missing is an
error that names it; a collective of the data plane would hang for the process group's timeout, 30
minutes by default. (Two-phase agreement over the store instead of a collective:
pytorch/pytorch#176920.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from triton_dist import knobs
from triton_dist.errors import RankDisagreement, RankTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.ranks.mailbox import Absent, Mailbox

T = TypeVar("T")


class ProcessGroupRanks:
    """Words that all ranks of ``process_group`` say together, in the same order.

    Steps are numbered; the n-th word of a rank meets the n-th word of the others. ``phase`` says
    what the step is for: it is in the error when a rank is missing, and different phases at one
    step are an error on every rank.

    A tuning has a conversation of its own (``converse``), with its own numbers. So what the tuned
    function says to the other ranks while it is tried is not taken for a word of the tuner, and
    ranks that were out of step when one conversation ended are in step in the next.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        topic: str = "",
        mailbox: Mailbox | None = None,
        leftovers: Sequence[str] = (),
    ) -> None:
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.is_leader = self.rank == 0
        self._topic = topic
        self._mailbox = mailbox or Mailbox(process_group, self.rank)
        self._step = 0
        self._written = list(leftovers)
        self._conversations = itertools.count(1)
        self._last: ProcessGroupRanks | None = None
        self._align_word: torch.Tensor | None = None

    def facts(self) -> Mapping[str, str]:
        return {
            "world_size": str(self.size),
            "local_world_size": str(knobs.local_world_size.get()),
        }

    def converse(self) -> ProcessGroupRanks:
        """The same ranks, about one thing: the n-th conversation of a rank meets the n-th of the
        others.

        One that another rank has left already is skipped: it waited there for this rank in vain.
        """
        topics = (f"conversation {number}/" for number in self._conversations)
        topic = next(topic for topic in topics if not self._mailbox.has(f"{topic}left"))
        leftovers = self._last._written if self._last is not None else ()
        self._last = ProcessGroupRanks(self.process_group, topic, self._mailbox, leftovers)
        return self._last

    def leave(self, reason: str) -> None:
        """Tell ranks that wait for this one, or will, that it does not come. Does not block."""
        name = f"{self._topic}left"
        with self._reachable(f"leaving ({reason})"):
            if not self._mailbox.has(name):  # the first to leave knows why
                self._mailbox.put(name, (self.rank, f"left: {reason}"))
                self._written.append(name)

    def decide(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        step = self._next_step()
        if self.is_leader:
            self._put(step, phase, value)
            return value  # type: ignore[return-value]  # the leader always brings a value
        ((leaders_phase, decided),) = self._take(step, phase, [0], seconds)
        if leaders_phase != phase:
            raise RankDisagreement(
                f"step {step} of the tuning", {0: leaders_phase, self.rank: phase}
            )
        return decided  # type: ignore[no-any-return]

    def gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        step = self._next_step()
        before = len(self._written)
        self._put(step, phase, value)
        entries = self._take(step, phase, range(self.size), seconds)
        if any(other != phase for other, _ in entries):
            raise RankDisagreement(
                f"step {step} of the tuning",
                {rank: other for rank, (other, _) in enumerate(entries)},
            )
        # All ranks are here, so all have read what came before, in the last conversation too.
        self._mailbox.delete(self._written[:before])
        del self._written[:before]
        return [value for _, value in entries]

    def all_agree(self, phase: str, flag: bool) -> bool:
        return all(self.gather(phase, flag))

    def maximum(self, phase: str, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self.gather(phase, list(values)), strict=True)]

    def barrier(self, phase: str, seconds: float | None = None) -> None:
        self.gather(phase, None, seconds)

    def align(
        self,
        phase: str = "align",
        seconds: float | None = None,
        hold: Callable[[], object] | None = None,
    ) -> None:
        """On GPUs a one-element all-reduce, queued on the current stream; on CPU ranks a barrier.

        The all-reduce follows a barrier over the store, so every rank is known to be about to queue
        it; ``hold`` comes between them.
        """
        self.barrier(phase, seconds)
        if hold is not None:
            hold()
        if torch.cuda.is_available() and "nccl" in dist.get_backend_config(self.process_group):
            if self._align_word is None:
                self._align_word = torch.zeros(1, device="cuda")
            dist.all_reduce(self._align_word, group=self.process_group)

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _put(self, step: int, phase: str, value: Any) -> None:
        with self._reachable(phase):
            self._mailbox.put(self._name(step, self.rank), (phase, value))
        self._written.append(self._name(step, self.rank))

    def _take(
        self, step: int, phase: str, ranks: Sequence[int], seconds: float | None
    ) -> list[tuple[str, Any]]:
        if seconds is None:
            seconds = min(knobs.autotune_timeout.get(), waits.limit_seconds() or float("inf"))
        names = {rank: self._name(step, rank) for rank in ranks}
        try:
            with self._reachable(phase):
                return self._mailbox.take(names, seconds, f"{self._topic}left")
        except Absent as absent:
            raise RankTimeout(
                rank=self.rank,
                phase=phase,
                missing=absent.missing,
                seconds=absent.seconds,
                because=absent.because,
            ) from None

    def _name(self, step: int, rank: int) -> str:
        return f"{self._topic}{step}/{rank}"

    @contextmanager
    def _reachable(self, phase: str) -> Iterator[None]:
        """The store ends with the process that serves it, a launcher or a rank."""
        try:
            yield
        except dist.DistError as error:
            raise RankTimeout(
                rank=self.rank,
                phase=phase,
                missing=[],
                seconds=0.0,
                because={self.rank: f"cannot reach the group's key-value store: {error}"},
            ) from error
