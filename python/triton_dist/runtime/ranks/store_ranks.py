"""Exchange messages between the ranks of a group over a key-value store.

Every wait for a message has a deadline, so a missing rank leads to an error that names the rank. A
collective of the process group would hang until the group's timeout, which is 10 minutes by default
with NCCL and 30 minutes with gloo.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist import knobs
from triton_dist.errors import RankDisagreement, RankTimeout
from triton_dist.runtime import waits
from triton_dist.runtime.ranks.mailbox import LeaveNotice, Mailbox, MissingRanks
from triton_dist.runtime.ranks.process import WorldRank

T = TypeVar("T")

_REMIND_SECONDS = 60.0
"""Time after which a waiting rank logs once which ranks are missing."""
_RETURN_SECONDS = 0.5
"""Seconds to wait for a rank that left an earlier channel. The error that made it leave may belong
to an earlier call, which needed no channel on the other ranks. The rank may then continue and join
the next channel."""

_log = logging.getLogger("triton_dist")


class StoreRanks:
    """Messages that all ranks of a group send in the same order.

    Messages are numbered by step: message n of a rank pairs with message n of the other ranks.
    ``phase`` names the purpose of a step. Errors about missing ranks contain the phase. If ranks
    are in different phases at one step, every rank raises an error.

    Each tuning uses a separate *channel* with separate step numbers, because the tuned function may
    itself send messages while a config is tried. A rank joins a channel with its first message.

    Channels are numbered too. Ranks may have opened different numbers of channels, because a rank
    may raise in a call that needs no channel on the other ranks. A rank *leaves* a channel if an
    error ends its call, before or after the first message. If a rank left a channel before all
    ranks joined it, ``first_all_gather`` continues with the next channel. All ranks therefore meet
    in the first channel that no rank has left.

    Args:
        store: a store without earlier entries. Only this group may use it.
        rank, size: this rank, and the number of ranks.
        global_ranks: global rank of each rank of the group; default: the ranks themselves.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, global_ranks: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size, self.is_leader = rank, size, rank == 0
        self.global_ranks = tuple(range(size)) if global_ranks is None else tuple(global_ranks)
        self._mailbox = Mailbox(store, rank)
        self._channel_numbers = itertools.count(1)
        self._channel_prefix = self._function = self._key = self._hint = ""
        self._call = self._step = 0
        self._written_names: list[str] = []
        self._last_channel: StoreRanks = self
        self._published_notes: dict[str, str] = {}
        self._has_reminded = False

    def global_rank(self, rank: int) -> int:
        """Return the global rank of ``rank``, for messages and errors. Its ``str`` includes host
        and local rank, unless the group has all ranks and ``rank`` is on this host."""
        with suppress(dist.DistError):
            own, process = self._mailbox.process(self.rank), self._mailbox.process(rank)
            per_host = knobs.local_world_size.get()
            # Hosts are numbered in the order of their ranks.
            host_index, local_rank = divmod(self.global_ranks[rank], per_host)
            if process is not None and process.local_rank >= 0:
                local_rank = process.local_rank
            host = process.host if process is not None else f"number {host_index}"
            if (
                own is not None
                and process is None
                and host_index == self.global_ranks[self.rank] // per_host
            ):
                host = own.host
            if not self._is_global_rank_unique(own is not None and host == own.host):
                return WorldRank(self.global_ranks[rank], f"host {host}, local rank {local_rank}")
        return WorldRank(self.global_ranks[rank])

    def _is_global_rank_unique(self, is_on_this_host: bool) -> bool:
        """Return whether the global rank alone identifies the rank."""
        return is_on_this_host and self.global_ranks == tuple(range(self.size))

    def facts(self) -> Mapping[str, str]:
        """Return the numbers of ranks in the group and on this host, for tuning records."""
        return {"world_size": str(self.size), "local_world_size": str(knobs.local_world_size.get())}

    def is_current(self) -> bool:
        """Return True: this group cannot be destroyed."""
        return True

    def agreement_seconds(self) -> float:
        """Return the default deadline of the first message of a channel, in seconds."""
        return knobs.autotune_meeting_timeout.get() or 1800.0

    def channel(
        self, function: str = "", key: str = "", call: int = 0, hint: str = ""
    ) -> StoreRanks:
        """Open a channel: channel n of a rank pairs with channel n of the other ranks.

        Args:
            function: the tuned function, for messages, and to check whether another rank left a
                channel of the same function.
            key: the tuned key, for messages.
            call: position of the call among the calls of ``function``, counted from 1 after the
                last channel that all ranks used for it. Identifies a refused call.
            hint: possible reason why other ranks do not join, for the reminder message.
        """
        new = copy.copy(self)
        new._written_names = (
            list(self._last_channel._written_names) if self._last_channel is not self else []
        )
        new._function, new._key, new._call, new._hint = function, key, call, hint
        new._step, new._has_reminded = 0, False
        new._next_channel()
        self._last_channel = new
        return new

    def abort(self, reason: str, refused: bool = False) -> None:
        """Leave the channel, and report the reason to the ranks that wait for this rank. Does not
        block. ``refused``: the call's arguments were invalid, so this rank sent no message."""
        own_notice = LeaveNotice(self.rank, self._function, self._call, reason, refused)
        with self._reporting_lost_store(f"leaving ({reason})"):
            while not self._mailbox.put_first(f"{self._channel_prefix}left", own_notice):
                notice = self._mailbox.find(f"{self._channel_prefix}left")
                # Keep the notice of the first rank that left: its reason is the original cause.
                if self._step or self._refuses_this_call(notice):
                    return
                self._next_channel()  # the channel that the remaining ranks join
            self._written_names.append(f"{self._channel_prefix}left")

    def note(self, function: str, text: str) -> None:
        """Store a note that may explain why this rank does not join a channel of ``function``.
        Equal notes are stored once. Does not block."""
        if self._published_notes.get(function) != text:
            self._published_notes[function] = text
            with suppress(RankTimeout), self._reporting_lost_store("note"):
                self._mailbox.put(f"note/{function}/{self.rank}", text)

    def first_all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """Gather ``value`` from all ranks as the first message of a channel.

        Raises:
            RankTimeout: a rank does not join within ``seconds`` (default: ``agreement_seconds``),
                or left a channel of the same function and does not return within 0.5 s.
            RankDisagreement: ranks are in different phases.
        """
        begin, num_earlier_entries = time.monotonic(), len(self._written_names)
        end = begin + (self.agreement_seconds() if seconds is None else seconds)
        return_deadline = end
        left_ranks: dict[int, LeaveNotice] = {}
        """Notices of ranks that may have left because of this call."""
        while True:
            missing_ranks = MissingRanks([], None, {}, 0.0)
            with self._reporting_lost_store(phase):
                notice: LeaveNotice | None = self._mailbox.find(f"{self._channel_prefix}left")
            if notice is None:
                if self._step == 0:
                    self._put(self._next_step(), phase, value)
                try:
                    entries = self._wait(
                        1, phase, range(self.size), return_deadline - time.monotonic()
                    )
                    return self._checked_values(1, phase, entries, num_earlier_entries)
                except MissingRanks as error:
                    missing_ranks, notice = error, error.notice
                if (
                    notice is None
                    and left_ranks
                    and left_ranks.keys().isdisjoint(missing_ranks.missing)
                ):
                    # The ranks that left have returned; other ranks are late.
                    left_ranks, return_deadline = {}, end
                    if not missing_ranks.reasons and time.monotonic() < end:
                        continue
            is_same_function = notice is not None and notice.function == self._function
            has_returned = left_ranks and is_same_function and missing_ranks.missing
            if notice is None or self._refuses_this_call(notice) or has_returned:
                self._step = 1
                missing = missing_ranks.missing or ([notice.rank] if notice else [])
                missing_ranks = MissingRanks(
                    missing, notice, missing_ranks.reasons, time.monotonic() - begin
                )
                raise self._timeout(phase, missing_ranks, left_ranks)
            if is_same_function:
                left_ranks[notice.rank] = notice
                return_deadline = min(end, time.monotonic() + _RETURN_SECONDS)
            self._next_channel()

    def broadcast(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        step = self._next_step()
        if self.is_leader:
            self._put(step, phase, value)
            return value  # type: ignore[return-value]  # the leader always passes a value
        ((leaders_phase, value_of_leader),) = self._receive_all(step, phase, [0], seconds)
        if leaders_phase != phase:
            by_rank = {self.global_rank(0): leaders_phase, self.global_rank(self.rank): phase}
            raise RankDisagreement(f"step {step} of the tuning", by_rank)
        return value_of_leader  # type: ignore[no-any-return]

    def all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        step = self._next_step()
        num_earlier_entries = len(self._written_names)
        self._put(step, phase, value)
        entries = self._receive_all(step, phase, range(self.size), seconds)
        return self._checked_values(step, phase, entries, num_earlier_entries)

    def barrier(self, phase: str, seconds: float | None = None) -> None:
        self.all_gather(phase, None, seconds)

    def pending_values(self) -> tuple[dict[int, Any], dict[int, str]]:
        """Return the values that other ranks have sent for the next step, and the reasons why
        other ranks cannot send theirs (process ended or stopped). Both by rank."""
        values: dict[int, Any] = {}
        reasons: dict[int, str] = {}
        others = [rank for rank in range(self.size) if rank != self.rank]
        with suppress(dist.DistError):
            for rank in others:
                entry = self._mailbox.find(self._name(self._step + 1, rank))
                if entry is not None:
                    values[rank] = entry[1]
            ended_or_stopped, stopped = self._mailbox.ended_or_stopped(
                [rank for rank in others if rank not in values]
            )
            reasons = ended_or_stopped | stopped
        return values, reasons

    def device_barrier(self) -> None:
        """Do nothing: these ranks queue no work on a device."""

    def _checked_values(
        self, step: int, phase: str, entries: list[tuple[str, T]], num_earlier_entries: int
    ) -> list[T]:
        """Return the values if all ranks are in ``phase``, else raise ``RankDisagreement``. Delete
        the ``num_earlier_entries`` first entries that this rank wrote."""
        if any(other != phase for other, _ in entries):
            by_rank = {self.global_rank(rank): other for rank, (other, _) in enumerate(entries)}
            raise RankDisagreement(f"step {step} of the tuning", by_rank)
        # All ranks have reached this step, so they have read all earlier entries.
        self._mailbox.delete(self._written_names[:num_earlier_entries])
        del self._written_names[:num_earlier_entries]
        return [value for _, value in entries]

    def _refuses_this_call(self, notice: LeaveNotice) -> bool:
        """Return whether ``notice`` reports that a rank refused this call."""
        return notice.refused and (notice.function, notice.call) == (self._function, self._call)

    def _next_channel(self) -> None:
        self._channel_prefix, self._step = f"channel {next(self._channel_numbers)}/", 0

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _put(self, step: int, phase: str, value: Any) -> None:
        with self._reporting_lost_store(phase):
            self._mailbox.put(self._name(step, self.rank), (phase, value))
        self._written_names.append(self._name(step, self.rank))

    def _receive_all(
        self, step: int, phase: str, ranks: Sequence[int], seconds: float | None
    ) -> list[tuple[str, Any]]:
        if seconds is None:
            seconds = min(knobs.autotune_timeout.get(), waits.limit_seconds() or float("inf"))
        try:
            return self._wait(step, phase, ranks, seconds)
        except MissingRanks as error:
            missing_ranks = error
        # Raised outside of the ``except`` block, so that MissingRanks is not its context.
        raise self._timeout(phase, missing_ranks)

    def _wait(
        self, step: int, phase: str, ranks: Sequence[int], seconds: float
    ) -> list[tuple[str, Any]]:
        names = {rank: self._name(step, rank) for rank in ranks}
        notice_name = f"{self._channel_prefix}left"

        def repeat_request(missing: list[int], waited: float) -> None:
            if waited >= _REMIND_SECONDS and not self._has_reminded:
                self._has_reminded = True
                self._remind(phase, missing, waited)

        with self._reporting_lost_store(phase):
            return self._mailbox.wait_for(
                names, seconds, notice_name, repeat_request, self.agreement_seconds
            )

    def _remind(self, phase: str, missing: Sequence[int], waited: float) -> None:
        subject = f"{self._function}, " if self._function else ""
        key = f" {self._key}" if self._key else ""
        awaited = ", ".join(str(self.global_rank(rank)) for rank in missing)
        known = "".join(f" Rank {r} {text}." for r, text in self._notes(missing).items())
        known = known or f" {self._hint}".rstrip()
        with suppress(OSError, ValueError):  # the user's logging handler has a closed stream
            _log.warning(
                f"rank {self.global_rank(self.rank)}: {subject}{phase}{key}: waiting for rank(s) "
                f"{awaited} for {waited:.0f} s.{known}"
            )

    def _notes(self, ranks: Sequence[int]) -> dict[int, str]:
        notes = {rank: self._mailbox.find(f"note/{self._function}/{rank}") for rank in ranks}
        return {self.global_rank(rank): text for rank, text in notes.items() if text is not None}

    def _timeout(
        self,
        phase: str,
        missing_ranks: MissingRanks,
        left_ranks: Mapping[int, LeaveNotice] | None = None,
    ) -> RankTimeout:
        """Build the error of this rank, with the known reasons why ranks are missing."""
        notices = dict(left_ranks or {})
        if missing_ranks.notice is not None:
            if self._refuses_this_call(missing_ranks.notice):
                notices.clear()  # the other notices are about earlier calls
            notices[missing_ranks.notice.rank] = missing_ranks.notice
        known = {rank: f"left: {notice.reason}" for rank, notice in notices.items()}
        # The reason why a rank left is more useful than the fact that its process ended.
        because = {
            self.global_rank(r): text for r, text in {**missing_ranks.reasons, **known}.items()
        }
        if not because:
            with suppress(dist.DistError):
                because = self._notes(missing_ranks.missing)
        return RankTimeout(
            rank=self.global_rank(self.rank),
            phase=phase,
            missing=[self.global_rank(rank) for rank in missing_ranks.missing],
            seconds=missing_ranks.seconds,
            because=because,
            refusals={
                self.global_rank(r): notice.reason
                for r, notice in notices.items()
                if notice.refused
            },
        )

    def _name(self, step: int, rank: int) -> str:
        return f"{self._channel_prefix}{step}/{rank}"

    @contextmanager
    def _reporting_lost_store(self, phase: str) -> Iterator[None]:
        """Context manager that raises ``RankTimeout`` if the store is lost, because the launcher or
        rank that serves it has ended."""
        begin = time.monotonic()
        try:
            yield
        except dist.DistError as error:
            # The lines after the first are C++ frames.
            reason = str(error).partition("\n")[0]
            if knobs.get_bool_env("TORCHELASTIC_USE_AGENT_STORE"):
                server, missing = WorldRank(self.global_ranks[self.rank]), []
                known = f"cannot reach the store that the launcher serves: {reason}"
            else:
                server, missing = WorldRank(0), [WorldRank(0)]
                known = f", which serves the store, ended or cannot be reached ({reason})"
            raise RankTimeout(
                rank=WorldRank(self.global_ranks[self.rank]),
                phase=phase,
                missing=missing,
                seconds=time.monotonic() - begin,
                because={server: known},
            ) from error


class ProcessGroupRanks(StoreRanks):
    """Messages between the ranks of ``process_group``."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = weakref.ref(process_group)
        super().__init__(
            distributed_c10d._get_process_group_store(process_group),
            process_group.rank(),
            process_group.size(),
            dist.get_process_group_ranks(process_group),
        )
        self._is_world = process_group is dist.group.WORLD
        self._barrier_tensor: torch.Tensor | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group, held by a weak reference. Raise ``ReferenceError`` if it was destroyed."""
        process_group = self._process_group()
        if process_group is None:
            raise ReferenceError("the process group was destroyed")
        return process_group

    def is_current(self) -> bool:
        """Return whether the process group still exists."""
        return self._process_group() in distributed_c10d._world.pg_map

    def agreement_seconds(self) -> float:
        """Return ``TRITON_DIST_AUTOTUNE_MEETING_TIMEOUT`` if it is set, else the timeout of the
        group's collectives, else 30 minutes; in seconds."""
        limit = knobs.autotune_meeting_timeout.get()
        if limit is not None:
            return limit
        seconds = []
        for device in getattr(self._process_group(), "_device_types", ()):
            with suppress(AttributeError, RuntimeError):  # not every backend has options
                options = self.process_group._get_backend(device).options
                seconds.append(options._timeout.total_seconds())
        return min(seconds, default=1800.0)

    def device_barrier(self) -> None:
        """Queue a one-element all-reduce on the current stream, so that the GPUs of all ranks
        continue at the same time. With gloo (ranks that share a GPU) the host waits for it. Call
        this right after a barrier: a missing rank causes a wait until the timeout of the group."""
        if not torch.cuda.is_available():
            return
        is_on_gpu = knobs.share_gpus.get() and torch.cuda.is_initialized()
        if is_on_gpu or "nccl" in dist.get_backend_config(self.process_group):
            if self._barrier_tensor is None:
                self._barrier_tensor = torch.zeros(1, device="cuda")
            dist.all_reduce(self._barrier_tensor, group=self.process_group)

    def _is_global_rank_unique(self, is_on_this_host: bool) -> bool:
        return is_on_this_host and self._is_world
