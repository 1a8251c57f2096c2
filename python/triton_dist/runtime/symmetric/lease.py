"""Leases of a rank's memory: the owner sees when no other process uses it any more.

A file without a name (memfd) stands for the memory. Each process that uses the memory holds a
shared lock of the file, which it opened through ``/proc/<pid>/fd/<n>``; when it is done, or ends
however it may, the lock is gone. Nobody has to answer, so nobody waits, for a rank that died
neither.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import NamedTuple


class LeaseOffer(NamedTuple):
    """Place at which other processes find the file."""

    pid: int
    fd: int


class OwnLease:
    """The file of this process's memory; ``give_back`` is called when it ends."""

    def __init__(self, give_back: Callable[[], object]) -> None:
        self._give_back = give_back
        self._fd = os.memfd_create("triton_dist-lease", os.MFD_CLOEXEC)
        self.offer = LeaseOffer(os.getpid(), self._fd)

    def end(self) -> bool:
        """Give the memory back, unless some process still uses it; whether it was."""
        if os.getpid() != self.offer.pid:  # a fork owns nothing
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.close(self._fd)
        self._give_back()
        return True


class HeldLease:
    """The right to use another process's memory, until it is closed.

    Raises:
        OSError: the other process cannot be reached through ``/proc``.
    """

    def __init__(self, offer: LeaseOffer) -> None:
        self._fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a fork may have the file open too
        os.close(self._fd)


_retired: list[OwnLease] = []


def retire(lease: OwnLease) -> None:
    """End ``lease``: now, or when ``end_retired`` finds that nobody uses its memory any more."""
    _retired.append(lease)
    end_retired()


def end_retired() -> None:
    """End all retired leases that can be ended."""
    _retired[:] = [lease for lease in _retired if not lease.end()]


os.register_at_fork(after_in_child=_retired.clear)
