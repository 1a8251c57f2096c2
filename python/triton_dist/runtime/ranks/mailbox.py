"""Entries that ranks of a group leave for one another in a key-value store."""

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

_PATIENCE_SECONDS = 0.25
"""Time until a rank looks whether the others can still come, and then between two such looks."""

_SPIN_SECONDS = 0.5e-3
"""Time for which a rank asks without a pause in between."""

_PAUSE_SECONDS = 2.0
"""Longer between two looks, and this process, its machine or the store's server was stopped."""


class Left(NamedTuple):
    """Message of a rank that does not come to a conversation, or sends nothing more in it."""

    rank: int
    function: str
    """Function that the conversation is about."""
    call: int
    """Number of the call of the function, since all ranks met in one."""
    reason: str
    refused: bool
    """True if the call was refused before this rank sent a message: its arguments were to blame."""


class Absent(Exception):
    """Some entries did not come.

    Attributes:
        missing: whose.
        left: the message of a rank that left.
        because: what is known of ranks that cannot come.
    """

    def __init__(
        self, missing: list[int], left: Left | None, because: Mapping[int, str], seconds: float
    ) -> None:
        self.missing, self.left, self.because, self.seconds = missing, left, because, seconds
        super().__init__(f"rank(s) {missing}: {left or because}")


class Mailbox:
    """Entries under names. Creating one is not collective.

    A store client holds its lock while it waits, so each thread talks through a client of its own:
    a wait here does not block another thread's tuning, or NCCL's heartbeat. A store written in
    Python has one client for all.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._rank = rank
        self._store = dist.PrefixStore("triton_dist/ranks", store)
        self._clients = threading.local()
        self.put(_process_name(rank), Process.own())

    def put(self, name: str, value: Any) -> None:
        self._client().set(name, pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes

    def put_first(self, name: str, value: Any) -> bool:
        """``put``, unless some rank has put something there before; whether this was the first."""
        entry = pickle.dumps(value)
        return self._client().compare_set(name, "", entry) == entry  # type: ignore[arg-type]

    def find(self, name: str) -> Any:
        """The entry that is there now, or ``None``."""
        client = self._client()
        return pickle.loads(client.get(name)) if client.check([name]) else None

    def process(self, rank: int) -> Process | None:
        """``None``: it has not sent a message yet."""
        process: Process | None = self.find(_process_name(rank))
        return process

    def take(
        self,
        names: Mapping[int, str],
        seconds: float,
        left: str,
        remind: Callable[[list[int], float], object],
        patience: Callable[[], float],
    ) -> list[Any]:
        """The entries of these ranks, waiting for those that are not there yet.

        Args:
            seconds: how long. Time in which this process is stopped does not count, nor that in
                which one is that is waited for, up to ``patience()`` seconds.
            left: name under which a rank says that it does not come.
            remind: called now and then with the ranks that are missing, and for how long.

        Raises:
            Absent: past ``seconds``, or as soon as it is known that one cannot come.
        """
        client = self._client()
        wanted = list(names.values())
        begin = last = time.monotonic()
        due, stops = begin + seconds, 0.0  # the latter: how long some other was stopped
        looked, look = begin, min(due, begin + _PATIENCE_SECONDS)
        # Polled, and not by the store's own wait: that one cannot be interrupted, does not see that
        # a rank is gone, and logs two warnings each time it ends in vain.
        while not client.check(wanted):
            now = time.monotonic()
            if now - last > _PAUSE_SECONDS:
                due += now - last
            last = now
            if now >= look:
                missing = [rank for rank, name in names.items() if not client.check([name])]
                farewell: Left | None = self.find(left)
                gone, stopped = self.gone(missing)
                if missing and (farewell or gone):
                    raise Absent(missing, farewell, gone, now - begin)
                if stopped and stops < patience():
                    stops += now - looked
                    due += now - looked
                if missing and is_overdue(due, due - begin):
                    raise Absent(missing, None, stopped, now - begin)
                remind(missing, now - begin)
                looked, look = now, min(now + _PATIENCE_SECONDS, max(now, due))
            # The later it is, the less an own delay matters; ranks in step need no sleep.
            if now - begin > _SPIN_SECONDS:
                time.sleep(min((now - begin) / 16, 0.02))
        if client.has_extended_api():  # type: ignore[attr-defined]
            return [pickle.loads(entry) for entry in client.multi_get(wanted)]
        return [pickle.loads(client.get(name)) for name in wanted]

    def delete(self, names: Iterable[str]) -> None:
        client = self._client()
        for name in names:
            with suppress(RuntimeError):  # a store written in Python may not be able to
                client.delete_key(name)

    def gone(self, missing: Sequence[int]) -> tuple[dict[int, str], dict[int, str]]:
        """Ranks on this host that have ended, and those that are stopped."""
        gone, stopped = {}, {}
        for rank in missing:
            process = self.process(rank)
            if process is not None and process.has_ended():
                gone[rank] = f"ended: there is no process {process.pid} any more"
            elif process is not None and process.is_stopped():
                stopped[rank] = f"is stopped: process {process.pid} waits for a signal to go on"
        return gone, stopped

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
