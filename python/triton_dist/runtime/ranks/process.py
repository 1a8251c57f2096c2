"""Whether another process of this host is still there."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """One process, told from a later one that has its number."""

    host: str
    """Host and process-number namespace: ``pid`` means something in there only."""
    pid: int
    started: str
    """Start time in clock ticks since boot; empty where the system does not tell."""

    @classmethod
    def own(cls) -> Process:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        _, started = _state(os.getpid())
        return cls(f"{socket.gethostname()} {namespace}", os.getpid(), started)

    def has_ended(self) -> bool:
        """Known to be gone. ``False`` also where it cannot be known, such as on another host."""
        if not self.started or self.host != Process.own().host:
            return False
        state, started = _state(self.pid)
        return state in ("", "Z", "X") or started != self.started  # a zombie answers no more


def _state(pid: int) -> tuple[str, str]:
    """State letter and start time; empty when there is no such process, or no ``/proc``."""
    try:
        # The name, in parentheses, may hold spaces and parentheses; what follows does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
