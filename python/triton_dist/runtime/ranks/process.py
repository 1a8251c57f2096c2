"""Identity of a rank's process, whether the process still runs, and the rank's text in messages."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import NamedTuple

from triton_dist import knobs
from triton_dist.runtime.job import ENDED_STATES, process_state


class Process(NamedTuple):
    """Identity of a process. A later process with the same process id has another identity."""

    host: str
    namespace: str
    """PID namespace in which ``pid`` is valid."""
    pid: int
    start_time: str
    """Start time in clock ticks since boot; empty if unknown."""
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
        return cls(socket.gethostname(), namespace, pid, process_state(pid)[1], local_rank)

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended. ``False`` for a process of another
        host, whose state is unknown."""
        state = self._known_state()
        return state is not None and state in ENDED_STATES

    def is_stopped(self) -> bool:
        """Return whether the process is known to be stopped, by a signal or a debugger."""
        return self._known_state() in ("T", "t")

    def _known_state(self) -> str | None:
        """Return the state letter of ``/proc/<pid>/stat``, "" if the process does not exist, or
        ``None`` if the state is unknown."""
        own = Process.own()
        if not self.start_time or (self.host, self.namespace) != (own.host, own.namespace):
            return None
        state, start_time = process_state(self.pid)
        return state if start_time == self.start_time else ""


class WorldRank(int):
    """A global rank whose ``str`` may include the location: ``3 (host a, local rank 1)``."""

    location: str

    def __new__(cls, rank: int, location: str = "") -> WorldRank:
        self = super().__new__(cls, rank)
        self.location = location
        return self

    def __str__(self) -> str:
        return f"{int(self)} ({self.location})" if self.location else f"{int(self)}"

    def __reduce__(self) -> tuple[type[WorldRank], tuple[int, str]]:
        return WorldRank, (int(self), self.location)
