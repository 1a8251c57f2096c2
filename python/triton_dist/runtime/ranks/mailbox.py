"""What the ranks of a group leave for one another in its key-value store."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from triton_dist.runtime.ranks.process import Process

_PATIENCE_SECONDS = 0.25
"""How long a rank waits before it looks whether the others can still come, and how often then."""

_SPIN_SECONDS = 0.5e-3
"""How long a rank asks without a pause in between."""


class Absent(Exception):
    """Some entries did not come.

    Attributes:
        missing: whose.
        because: what is known of a rank that cannot come, or that gave up waiting itself.
    """

    def __init__(self, missing: list[int], because: Mapping[int, str], seconds: float) -> None:
        self.missing, self.because, self.seconds = missing, because, seconds
        super().__init__(f"rank(s) {missing}: {because}")


class Mailbox:
    """Entries under names. Creating one is not collective.

    A store client holds its lock while it waits, so each thread talks through a client of its own:
    a wait here does not block another thread's tuning, or NCCL's heartbeat.
    """

    def __init__(self, process_group: dist.ProcessGroup, rank: int) -> None:
        self._rank = rank
        self._store = dist.PrefixStore(
            "triton_dist/ranks", distributed_c10d._get_process_group_store(process_group)
        )
        self._clients = threading.local()
        self._client().set(_process_name(rank), pickle.dumps(Process.own()))  # type: ignore[arg-type]

    def put(self, name: str, value: Any) -> None:
        self._client().set(name, pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes

    def take(self, names: Mapping[int, str], seconds: float, gone: str) -> list[Any]:
        """The entries of these ranks, waiting for those that are not there yet.

        Args:
            gone: name of an entry that says that some rank will not come.

        Raises:
            Absent: past ``seconds``, or as soon as it is known that one cannot come.
        """
        client = self._client()
        wanted = list(names.values())
        begin = time.monotonic()
        look = begin + min(seconds, _PATIENCE_SECONDS)
        # Polled, and not by the store's own wait: that one cannot be interrupted, does not see that
        # a rank is gone, and logs two warnings each time it ends in vain.
        while not client.check(wanted):
            now = time.monotonic()
            if now >= look:
                missing = [rank for rank, name in names.items() if not client.check([name])]
                because = self._gone(missing, gone)
                if missing and (because or now - begin >= seconds):
                    raise Absent(missing, because, now - begin)
                look = min(now + _PATIENCE_SECONDS, max(now, begin + seconds))
            # The later it is, the less an own delay matters; ranks in step need no sleep.
            if now - begin > _SPIN_SECONDS:
                time.sleep(min((now - begin) / 16, 0.02))
        if client.has_extended_api():  # type: ignore[attr-defined]
            return [pickle.loads(entry) for entry in client.multi_get(wanted)]
        return [pickle.loads(client.get(name)) for name in wanted]

    def has(self, name: str) -> bool:
        return self._client().check([name])

    def delete(self, names: Iterable[str]) -> None:
        client = self._client()
        for name in names:
            client.delete_key(name)

    def _gone(self, missing: list[int], gone: str) -> dict[int, str]:
        """Why ranks will not come, as far as it is known."""
        because = {}
        client = self._client()
        if client.check([gone]):
            rank, reason = pickle.loads(client.get(gone))
            because[rank] = reason
        for rank in missing:
            name = _process_name(rank)
            if client.check([name]):
                process = pickle.loads(client.get(name))
                if process.has_ended():  # after it left, perhaps: that says more
                    because.setdefault(rank, f"ended: there is no process {process.pid} any more")
        return because

    def _client(self) -> dist.Store:
        client: dist.Store | None = getattr(self._clients, "store", None)
        if client is None:
            client = self._clients.store = self._store.clone()  # type: ignore[attr-defined]
        return client


def _process_name(rank: int) -> str:
    return f"process/{rank}"
