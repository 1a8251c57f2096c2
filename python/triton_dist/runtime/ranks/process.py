"""Identity of a rank: its process, whether the process still runs, and how messages name it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from triton_dist import knobs


class Process(NamedTuple):
    """One process, told from a later one that has its number."""

    host: str
    namespace: str
    """Namespace of process numbers: ``pid`` means something in there only."""
    pid: int
    started: str
    """Start time in clock ticks since boot; empty where the system does not tell."""
    local_rank: int

    @classmethod
    def own(cls) -> Process:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
        pid = os.getpid()
        local_rank = -1
        with suppress(knobs.InvalidKnob):
            local_rank = knobs.get_int_env("LOCAL_RANK", -1)
        return cls(socket.gethostname(), namespace, pid, _state(pid)[1], local_rank)

    def has_ended(self) -> bool:
        """Known to be gone. ``False`` also where it cannot be known, such as on another host."""
        state = self._known_state()
        return state is not None and state in ("", "Z", "X")  # a zombie answers no more

    def is_stopped(self) -> bool:
        """Known to be halted by a signal (``SIGSTOP``, Ctrl-Z) or by a debugger."""
        return self._known_state() in ("T", "t")

    def _known_state(self) -> str | None:
        """The letter of its state, empty if there is no such process; ``None``: unknown."""
        own = Process.own()
        if not self.started or (self.host, self.namespace) != (own.host, own.namespace):
            return None
        state, started = _state(self.pid)
        return state if started == self.started else ""


def _state(pid: int) -> tuple[str, str]:
    """State letter and start time; empty when there is no such process, or no ``/proc``."""
    try:
        # The name, in parentheses, may hold spaces and parentheses; what follows does not.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class WorldRank(int):
    """Rank of the world. As text it says its host and local rank too, where that says more:
    ``3 (host a, local rank 1)``."""

    where: str

    def __new__(cls, rank: int, where: str = "") -> WorldRank:
        self = super().__new__(cls, rank)
        self.where = where
        return self

    def __str__(self) -> str:
        return f"{int(self)} ({self.where})" if self.where else f"{int(self)}"

    def __reduce__(self) -> tuple[type[WorldRank], tuple[int, str]]:
        return WorldRank, (int(self), self.where)
