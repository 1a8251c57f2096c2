"""Store and read the messages of a group in a key-value store.

The ranks of a group exchange messages in *channels* (``StoreRanks.channel``). Each tuning of a key
uses a new channel. A rank joins a channel with its first message.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from triton_dist.runtime.deadlines import is_overdue
from triton_dist.runtime.ranks.process import Process

_CHECK_INTERVAL_SECONDS = 0.25
"""Interval at which a waiting rank checks whether the missing ranks are still alive."""

_SPIN_SECONDS = 0.5e-3
"""Time for which a rank polls without sleeping."""

_STOPPED_GAP_SECONDS = 2.0
"""A longer gap between two polls means that this process, its host or the store was stopped."""


class LeaveNotice(NamedTuple):
    """Message of a rank that does not join a channel, or that sends no more messages in it."""

    rank: int
    function: str
    """Function that the channel tunes, or another subject of the channel."""
    call: int
    """Number of the call among the calls of the function, counted from 1 after the last channel
    that all ranks used for the function."""
    reason: str
    refused: bool
    """Whether the call was refused before this rank sent a message, because of its arguments."""


class MissingRanks(Exception):
    """Raised when messages of some ranks did not arrive.

    Attributes:
        missing: the ranks whose messages did not arrive.
        notice: the message of a rank that left the channel, or ``None``.
        reasons: known reasons why a rank is missing, by rank.
        seconds: time waited.
    """

    def __init__(
        self,
        missing: list[int],
        notice: LeaveNotice | None,
        reasons: Mapping[int, str],
        seconds: float,
    ) -> None:
        self.missing, self.notice, self.reasons, self.seconds = missing, notice, reasons, seconds
        super().__init__(f"rank(s) {missing}: {notice or reasons}")


class Mailbox:
    """Named entries in a store. Creation is not collective.

    A store client holds its lock while it waits. Each thread therefore uses its own client, so a
    wait does not block the tuning of another thread or the heartbeat of NCCL. A store written in
    Python has a single client.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._store = dist.PrefixStore("triton_dist/ranks", store)
        self._clients = threading.local()
        self.put(_process_name(rank), Process.own())

    def put(self, name: str, value: Any) -> None:
        self._client().set(name, pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes

    def put_first(self, name: str, value: Any) -> bool:
        """Store ``value`` unless the entry exists. Return whether this call stored it."""
        entry = pickle.dumps(value)
        return self._client().compare_set(name, "", entry) == entry  # type: ignore[arg-type]

    def find(self, name: str) -> Any:
        """Return the value of the entry ``name``, or ``None`` if it does not exist."""
        client = self._client()
        return pickle.loads(client.get(name)) if client.check([name]) else None

    def process(self, rank: int) -> Process | None:
        """Return the process of ``rank``, or ``None`` before its first message."""
        process: Process | None = self.find(_process_name(rank))
        return process

    def wait_for(
        self,
        names: Mapping[int, str],
        seconds: float,
        notice_name: str,
        on_wait: Callable[[list[int], float], object],
        max_stopped_seconds: Callable[[], float],
    ) -> list[Any]:
        """Wait for the entries of these ranks and return them.

        Args:
            names: name of the awaited entry of each rank.
            seconds: time limit. Time in which this process is stopped does not count. Time in which
                an awaited process is stopped does not count either, up to
                ``max_stopped_seconds()`` seconds.
            notice_name: name of the entry for a ``LeaveNotice``.
            on_wait: called regularly with the missing ranks and the seconds waited so far.

        Raises:
            MissingRanks: after the time limit, or as soon as a rank has left the channel or the
                process of a missing rank has ended.
        """
        client = self._client()
        entry_names = list(names.values())
        begin = last_poll = time.monotonic()
        deadline, stopped_seconds = begin + seconds, 0.0
        last_check, next_check = begin, min(deadline, begin + _CHECK_INTERVAL_SECONDS)
        # Poll instead of calling ``Store.wait``, which cannot be interrupted, does not notice that
        # a rank ended, and logs two warnings for each timeout.
        while not client.check(entry_names):
            now = time.monotonic()
            if now - last_poll > _STOPPED_GAP_SECONDS:
                deadline += now - last_poll
            last_poll = now
            if now >= next_check:
                missing = [rank for rank, name in names.items() if not client.check([name])]
                notice: LeaveNotice | None = self.find(notice_name)
                ended, stopped = self.ended_or_stopped(missing)
                if missing and (notice or ended):
                    raise MissingRanks(missing, notice, ended, now - begin)
                if stopped and stopped_seconds < max_stopped_seconds():
                    stopped_seconds += now - last_check
                    deadline += now - last_check
                if missing and is_overdue(deadline, deadline - begin):
                    raise MissingRanks(missing, None, stopped, now - begin)
                on_wait(missing, now - begin)
                last_check, next_check = now, min(now + _CHECK_INTERVAL_SECONDS, max(now, deadline))
            # Back off in proportion to the time waited. Waits of up to 0.5 ms never sleep.
            if now - begin > _SPIN_SECONDS:
                time.sleep(min((now - begin) / 16, 0.02))
        if client.has_extended_api():  # type: ignore[attr-defined]
            return [pickle.loads(entry) for entry in client.multi_get(entry_names)]
        return [pickle.loads(client.get(name)) for name in entry_names]

    def delete(self, names: Iterable[str]) -> None:
        client = self._client()
        for name in names:
            with suppress(RuntimeError):  # a store written in Python may not support it
                client.delete_key(name)

    def ended_or_stopped(self, missing: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Return the missing ranks whose process has ended, and those whose process is stopped.
        Both dicts have a text for messages by rank. Processes of other hosts are not checked."""
        ended, stopped = {}, {}
        for rank in missing:
            process = self.process(rank)
            if process is not None and process.has_ended():
                ended[rank] = f"ended: there is no process {process.pid} any more"
            elif process is not None and process.is_stopped():
                stopped[rank] = f"is stopped: process {process.pid} waits for a signal to continue"
        return ended, stopped

    def _client(self) -> dist.Store:
        client: dist.Store | None = getattr(self._clients, "store", None)
        if client is None:
            try:
                client = self._store.clone()  # type: ignore[attr-defined]
            except dist.DistError:
                raise
            except RuntimeError:  # "pure virtual function": a store written in Python
                client = self._store
            self._clients.store = client
        return client


def _process_name(rank: int) -> str:
    return f"process/{rank}"
