"""Time of a tuning, by what it is spent on."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Phase = Literal["compile", "measure", "search", "agree"]


class Clock:
    """Seconds by phase. Phases do not nest: time in an inner one counts for the outer.

    ``compile``: until a candidate is ready to run, on whichever rank. ``measure``: runs and
    samples, with lining up for them. ``search``: the leader's search, which picks the next config.
    ``agree``: all other waits for other ranks.
    """

    def __init__(self) -> None:
        self.seconds: dict[Phase, float] = dict.fromkeys(get_args(Phase), 0.0)
        self._running = False

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        if self._running:
            yield
            return
        self._running, begin = True, time.monotonic()
        try:
            yield
        finally:
            self._running = False
            self.seconds[name] += time.monotonic() - begin


def timestamp() -> str:
    """Now, as records have it: UTC, ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
