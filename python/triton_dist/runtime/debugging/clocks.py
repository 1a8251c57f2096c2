"""Vector clocks of a rank's programs and of its copy streams, and a board of all ranks' ones."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from triton_dist import knobs
from triton_dist.runtime.debugging.job import made_folder
from triton_dist.runtime.debugging.shadows import how_many, number_of, own_rank

_instances = itertools.count()


class Clocks:
    """Knowledge of this rank: how many releases of each number came before.

    Attributes:
        copying: file and line that queued the copy that this thread does; no line: it does none.
    """

    def __init__(self) -> None:
        self.copying = _Copying()
        self._clocks: dict[tuple[int, int], Any] = {}  # by number and size of the world: of a job
        # Ranks begin checks alike; those of earlier ones have left their clocks in the folder.
        self._instance = next(_instances)
        self._board: tuple[Any, Any] = (None, None)

    @property
    def own(self) -> int:
        """Number of what this thread does."""
        return number_of(copying=bool(self.copying.line))

    @property
    def now(self) -> Any:
        """Clock of what this thread does."""
        return self._clock_of(self.own)

    def move_on(self, copying: bool = False) -> Any:
        """Return what this rank's programs, or its copy streams, know now; what they do from now on
        is not part of it."""
        number = number_of(copying)
        clock = self._clock_of(number)
        known = clock.copy()
        clock[number] += 1
        return known

    def learn(self, rows: Any) -> None:
        """Take over what others knew, a row each."""
        clock = self.now
        if rows.size:
            np.maximum(clock, rows.reshape(-1, clock.size).max(0), out=clock)

    def publish(self) -> None:
        """Let all ranks that ``learn`` the board know what this one knows."""
        self.board()[own_rank()] = self.move_on()

    def board(self) -> Any:
        """Return a row of each rank, which all of this host map."""
        size, folder = knobs.world_size.get(), made_folder()
        if self._board[0] != (folder, size):
            path = folder / f"clocks-{size}-{self._instance}"
            with path.open("ab") as file:
                file.truncate(4 * size * how_many())
            rows = np.memmap(path, np.int32, "r+", shape=(size, how_many()))
            self._board = (folder, size), rows
        return self._board[1]

    def _clock_of(self, number: int) -> Any:
        key = number, knobs.world_size.get()
        if key not in self._clocks:
            clock = self._clocks[key] = np.zeros(how_many(), np.int32)
            clock[number] = 1
        return self._clocks[key]


class _Copying(threading.local):
    """File and line that queued what this thread does; no line: it is no copy stream's."""

    file = ""
    line = 0
