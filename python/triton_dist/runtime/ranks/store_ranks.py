"""The ranks of a group, co-ordinated over a key-value store.

Every message has a deadline, so a rank that is missing is an error that names it; a collective of
the data plane would hang for the process group's timeout, 30 minutes by default. (Two-phase
agreement over the store instead of a collective: pytorch/pytorch#176920.)
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist import knobs
from triton_dist.errors import RankDisagreement, RankTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.ranks.mailbox import Absent, Left, Mailbox
from triton_dist.runtime.ranks.process import WorldRank

T = TypeVar("T")

_REMIND_SECONDS = 60.0
_RETURN_SECONDS = 0.5
"""A rank that stayed away from a meeting may have gone on after an error in a call that the others
did not need it for, and comes to the next one. How long it is waited for there."""

_log = logging.getLogger("triton_dist")


class StoreRanks:
    """Messages that all ranks of a group send together, in the same order.

    Steps are numbered; the n-th message of a rank meets the n-th of the others. ``phase`` says
    what the step is for: it is in the error when a rank is missing, and different phases at one
    step are an error on every rank.

    A tuning has a conversation of its own (``channel``), with its own numbers. So what the tuned
    function says to the other ranks while it is tried is not taken for a message of the tuner.

    Conversations are numbered too, and ranks need not count alike, because a rank may raise in a
    call that is a hit on the others. This keeps them in step: a conversation that ended badly for
    some rank, or that it never sent a message in, is one that some rank has *left*; ``meet`` goes
    on to the next number where one was left before all came. So all ranks that are about to meet do
    so in the first conversation that nobody has left.

    Args:
        store: of the group alone, and of this initialisation of it: what an earlier one has left
            there would be taken for messages of this one. (torch's own groups need that too.)
        world: the ranks of the world that the ranks of the group are; default: the same.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, world: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.is_leader = rank, size, rank == 0
        self.world = tuple(range(size)) if world is None else tuple(world)
        self._mailbox = Mailbox(store, rank)
        self._numbers = itertools.count(1)
        self._topic = self._function = self._key = self._hint = ""
        self._call = self._step = 0
        self._written: list[str] = []
        self._last: StoreRanks = self
        self._noted: dict[str, str] = {}
        self._reminded = False

    def named(self, rank: int) -> int:
        """The rank of the world that ``rank`` of the group is, for messages and attributes of
        errors. Its text has host and local rank where the group is not a whole world of one host.
        """
        with suppress(dist.DistError):
            own, process = self._mailbox.process(self.rank), self._mailbox.process(rank)
            per_host, known = knobs.local_world_size.get(), process is not None
            index, local_rank = divmod(self.world[rank], per_host)  # as launchers number them
            if process is not None and process.local_rank >= 0:
                local_rank = process.local_rank
            host = process.host if process is not None else f"number {index}"
            if own is not None and not known and index == self.world[self.rank] // per_host:
                host = own.host
            if not self._is_plain(own is not None and host == own.host):
                return WorldRank(self.world[rank], f"host {host}, local rank {local_rank}")
        return WorldRank(self.world[rank])

    def _is_plain(self, is_on_this_host: bool) -> bool:
        """True if the rank of the world says all."""
        return is_on_this_host and self.world == tuple(range(self.size))

    def facts(self) -> Mapping[str, str]:
        return {
            "world_size": str(self.size),
            "local_world_size": str(knobs.local_world_size.get()),
        }

    def is_current(self) -> bool:
        """True: nobody destroys these ranks."""
        return True

    def agreement_seconds(self) -> float:
        """Limit of the first message of a conversation, unless its caller gives another."""
        return knobs.autotune_meeting_timeout.get() or 1800.0

    def channel(
        self, function: str = "", key: str = "", call: int = 0, hint: str = ""
    ) -> StoreRanks:
        """The same ranks, about one thing: the n-th conversation of a rank meets the n-th of the
        others.

        Args:
            function, key: what it is about, for messages; the function is also what tells whether a
                rank left because of the same.
            call: which call of ``function`` it is, since all ranks met in one. Ranks that count
                alike know whether a call that was refused on one of them is the one that they
                are in.
            hint: what may explain that others do not come, for a message while they are awaited.
        """
        new = copy.copy(self)
        new._written = list(self._last._written) if self._last is not self else []
        new._function, new._key, new._call, new._hint = function, key, call, hint
        new._step, new._reminded = 0, False
        new._next_topic()
        self._last = new
        return new

    def abort(self, reason: str, refused: bool = False) -> None:
        """Tell ranks that wait for this one, or will, that it does not come. Does not block."""
        last = Left(self.rank, self._function, self._call, reason, refused)
        with self._reachable(f"leaving ({reason})"):
            while not self._mailbox.put_first(f"{self._topic}left", last):
                left = self._mailbox.find(f"{self._topic}left")
                if self._step or self._is_of_this_call(left):  # the first to leave knows why
                    return
                self._next_topic()  # where all come who have not left yet
            self._written.append(f"{self._topic}left")

    def note(self, function: str, text: str) -> None:
        """Leave a note, once for a text, that may explain to the others why this rank does not come
        to a conversation about ``function``. Does not block."""
        if self._noted.get(function) != text:
            self._noted[function] = text
            with suppress(RankTimeout), self._reachable("note"):
                self._mailbox.put(f"note/{function}/{self.rank}", text)

    def meet(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """``all_gather`` as the first message of a conversation.

        Raises:
            RankTimeout: a rank does not come within ``seconds`` (default: ``agreement_seconds``),
                or has left a conversation about the same and does not come back at once.
            RankDisagreement: as ``all_gather``.
        """
        begin, before = time.monotonic(), len(self._written)
        end = begin + (self.agreement_seconds() if seconds is None else seconds)
        back = end
        away: dict[int, Left] = {}
        """Those that may have been meant for this call."""
        while True:
            absent = Absent([], None, {}, 0.0)
            with self._reachable(phase):
                left: Left | None = self._mailbox.find(f"{self._topic}left")
            if left is None:
                if self._step == 0:
                    self._put(self._next_step(), phase, value)
                try:
                    entries = self._wait(1, phase, range(self.size), back - time.monotonic())
                    return self._compared(1, phase, entries, before)
                except Absent as error:
                    absent, left = error, error.left
                if left is None and away and away.keys().isdisjoint(absent.missing):
                    away, back = {}, end  # they have come back; others are late
                    if not absent.because and time.monotonic() < end:
                        continue
            same = left is not None and left.function == self._function
            if left is None or self._is_of_this_call(left) or (away and same and absent.missing):
                self._step = 1
                missing = absent.missing or ([left.rank] if left else [])
                absent = Absent(missing, left, absent.because, time.monotonic() - begin)
                raise self._timeout(phase, absent, away)
            if same:
                away[left.rank], back = left, min(end, time.monotonic() + _RETURN_SECONDS)
            self._next_topic()

    def broadcast(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        step = self._next_step()
        if self.is_leader:
            self._put(step, phase, value)
            return value  # type: ignore[return-value]  # the leader always brings a value
        ((leaders_phase, decided),) = self._take(step, phase, [0], seconds)
        if leaders_phase != phase:
            by_rank = {self.named(0): leaders_phase, self.named(self.rank): phase}
            raise RankDisagreement(f"step {step} of the tuning", by_rank)
        return decided  # type: ignore[no-any-return]

    def all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        step = self._next_step()
        before = len(self._written)
        self._put(step, phase, value)
        entries = self._take(step, phase, range(self.size), seconds)
        return self._compared(step, phase, entries, before)

    def maximum(self, phase: str, values: Sequence[float]) -> list[float]:
        return [max(column) for column in zip(*self.all_gather(phase, list(values)), strict=True)]

    def barrier(self, phase: str, seconds: float | None = None) -> None:
        self.all_gather(phase, None, seconds)

    def align(
        self,
        phase: str = "align",
        seconds: float | None = None,
        hold: Callable[[], object] | None = None,
    ) -> None:
        """A barrier, then ``hold``, which queues work, then :meth:`line_up`."""
        self.barrier(phase, seconds)
        if hold is not None:
            hold()
        self.line_up()

    def others(self) -> tuple[dict[int, Any], dict[int, str]]:
        values: dict[int, Any] = {}
        why: dict[int, str] = {}
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(dist.DistError):
            for rank in others:
                entry = self._mailbox.find(self._name(self._step + 1, rank))
                if entry is not None:
                    values[rank] = entry[1]
            gone, stopped = self._mailbox.gone([rank for rank in others if rank not in values])
            why = gone | stopped
        return values, why

    def line_up(self) -> None:
        """Nothing: these ranks queue no work."""

    def _compared(
        self, step: int, phase: str, entries: list[tuple[str, T]], before: int
    ) -> list[T]:
        """The values, if all ranks are in ``phase``."""
        if any(other != phase for other, _ in entries):
            by_rank = {self.named(rank): other for rank, (other, _) in enumerate(entries)}
            raise RankDisagreement(f"step {step} of the tuning", by_rank)
        # All ranks are here, so all have read what came before, in the last conversation too.
        self._mailbox.delete(self._written[:before])
        del self._written[:before]
        return [value for _, value in entries]

    def _is_of_this_call(self, left: Left) -> bool:
        """True if a rank left because this very call was refused there."""
        return left.refused and (left.function, left.call) == (self._function, self._call)

    def _next_topic(self) -> None:
        self._topic, self._step = f"conversation {next(self._numbers)}/", 0

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
        try:
            return self._wait(step, phase, ranks, seconds)
        except Absent as error:
            absent = error
        # Not in the ``except`` block: only an exception that the caller handles is the context.
        raise self._timeout(phase, absent)

    def _wait(
        self, step: int, phase: str, ranks: Sequence[int], seconds: float
    ) -> list[tuple[str, Any]]:
        names = {rank: self._name(step, rank) for rank in ranks}
        left = f"{self._topic}left"

        def remind(missing: list[int], waited: float) -> None:
            if waited >= _REMIND_SECONDS and not self._reminded:
                self._reminded = True
                self._remind(phase, missing, waited)

        with self._reachable(phase):
            return self._mailbox.take(names, seconds, left, remind, self.agreement_seconds)

    def _remind(self, phase: str, missing: Sequence[int], waited: float) -> None:
        about = f"{self._function}, " if self._function else ""
        key = f" {self._key}" if self._key else ""
        awaited = ", ".join(str(self.named(rank)) for rank in missing)
        known = "".join(f" Rank {r} {text}." for r, text in self._notes(missing).items())
        known = known or f" {self._hint}".rstrip()
        with suppress(OSError, ValueError):  # a handler of the user whose stream is closed
            _log.warning(
                f"rank {self.named(self.rank)}: {about}{phase}{key}: waiting for rank(s) {awaited} "
                f"for {waited:.0f} s.{known}"
            )

    def _notes(self, ranks: Sequence[int]) -> dict[int, str]:
        """Notes that they have left."""
        notes = {rank: self._mailbox.find(f"note/{self._function}/{rank}") for rank in ranks}
        return {self.named(rank): text for rank, text in notes.items() if text is not None}

    def _timeout(
        self, phase: str, absent: Absent, away: Mapping[int, Left] | None = None
    ) -> RankTimeout:
        """The error of this rank, with all that is known of those who do not come."""
        lefts = dict(away or {})
        if absent.left is not None:
            if self._is_of_this_call(absent.left):
                lefts.clear()  # they were for earlier ones
            lefts[absent.left.rank] = absent.left
        known = {rank: f"left: {left.reason}" for rank, left in lefts.items()}
        # That a rank has ended says less than why it left.
        because = {self.named(r): text for r, text in {**absent.because, **known}.items()}
        if not because:
            with suppress(dist.DistError):
                because = self._notes(absent.missing)
        return RankTimeout(
            rank=self.named(self.rank),
            phase=phase,
            missing=[self.named(rank) for rank in absent.missing],
            seconds=absent.seconds,
            because=because,
            refusals={self.named(r): left.reason for r, left in lefts.items() if left.refused},
        )

    def _name(self, step: int, rank: int) -> str:
        return f"{self._topic}{step}/{rank}"

    @contextmanager
    def _reachable(self, phase: str) -> Iterator[None]:
        """The store ends with the process that serves it, a launcher or a rank."""
        begin = time.monotonic()
        try:
            yield
        except dist.DistError as error:
            # What follows the first line are frames of C++.
            reason = str(error).partition("\n")[0]
            if knobs.get_bool_env("TORCHELASTIC_USE_AGENT_STORE"):
                server, missing = WorldRank(self.world[self.rank]), []
                known = f"cannot reach the store that the launcher serves: {reason}"
            else:
                server, missing = WorldRank(0), [WorldRank(0)]
                known = f", which serves the store, ended or cannot be reached ({reason})"
            raise RankTimeout(
                rank=WorldRank(self.world[self.rank]),
                phase=phase,
                missing=missing,
                seconds=time.monotonic() - begin,
                because={server: known},
            ) from error


class ProcessGroupRanks(StoreRanks):
    """Messages that all ranks of ``process_group`` send together."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(process_group)
        super().__init__(
            distributed_c10d._get_process_group_store(process_group),
            process_group.rank(),
            process_group.size(),
            dist.get_process_group_ranks(process_group),
        )
        self._is_world = process_group is dist.group.WORLD
        self._met_on_device: torch.Tensor | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group, which this does not keep alive.

        Raises:
            ReferenceError: it was destroyed.
        """
        process_group = self._process_group()
        if process_group is None:
            raise ReferenceError("the process group was destroyed")
        return process_group

    def is_current(self) -> bool:
        """True if the process group was not destroyed yet; then nothing that was agreed in it
        counts any more."""
        return self._process_group() in distributed_c10d._world.pg_map

    def agreement_seconds(self) -> float:
        """The knob's, else as long as the group's own collectives wait, else 30 minutes."""
        limit = knobs.autotune_meeting_timeout.get()
        if limit is not None:
            return limit
        seconds = []
        for device in getattr(self._process_group(), "_device_types", ()):
            with suppress(AttributeError, RuntimeError):  # not every backend has options
                options = self.process_group._get_backend(device).options
                seconds.append(options._timeout.total_seconds())
        return min(seconds, default=1800.0)

    def line_up(self) -> None:
        """On GPUs queue a one-element all-reduce on the current stream; gloo, which ranks have
        that share GPUs, waits for the stream and for the ranks. All ranks must be about to queue
        it, as after a barrier; else it would wait for the process group's timeout."""
        if not torch.cuda.is_available():
            return
        is_on_gpu = knobs.share_gpus.get() and torch.cuda.is_initialized()
        if is_on_gpu or "nccl" in dist.get_backend_config(self.process_group):
            if self._met_on_device is None:
                self._met_on_device = torch.zeros(1, device="cuda")
            dist.all_reduce(self._met_on_device, group=self.process_group)

    def _is_plain(self, is_on_this_host: bool) -> bool:
        return is_on_this_host and self._is_world
