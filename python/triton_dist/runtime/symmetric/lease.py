"""Leases on a rank's memory. They show the owner when no other process uses the memory any more.

The owner creates a file without a name (memfd) for the memory. Each process that uses the memory
opens this file through ``/proc/<pid>/fd/<n>`` and holds a shared lock on it. The operating system
releases the lock when the process closes the file or ends in any way. The owner needs no message
and never waits, even if a rank has died.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import NamedTuple


class LeaseOffer(NamedTuple):
    """Process and file descriptor through which other processes open the file."""

    pid: int
    fd: int


class LeaseOwner:
    """The file for memory of this process. ``release`` is called when the lease ends."""

    def __init__(self, release: Callable[[], object]) -> None:
        self._release = release
        self._fd = os.memfd_create("triton_dist-lease", os.MFD_CLOEXEC)
        self.offer = LeaseOffer(os.getpid(), self._fd)

    def end(self) -> bool:
        """Release the memory unless a process still uses it, and return whether it was released."""
        if os.getpid() != self.offer.pid:  # a forked child does not own the memory
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.close(self._fd)
        self._release()
        return True


class LeaseHolder:
    """Shared lock on the file for another process's memory, held until ``close``."""

    def __init__(self, offer: LeaseOffer) -> None:
        self._fd = os.open(f"/proc/{offer.pid}/fd/{offer.fd}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # a forked child may keep the file open
        os.close(self._fd)


_retired: list[LeaseOwner] = []


def retire(lease: LeaseOwner) -> None:
    """End ``lease``, now or in a later ``end_retired``, once no process uses its memory."""
    _retired.append(lease)
    end_retired()


def end_retired() -> None:
    """End all retired leases that are no longer in use."""
    _retired[:] = [lease for lease in _retired if not lease.end()]


os.register_at_fork(after_in_child=_retired.clear)
