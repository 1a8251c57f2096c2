"""Order among the programs of a rank's running kernel, for the check of races."""

from __future__ import annotations

from collections.abc import Iterable

from triton_dist.runtime import interpreter


class ProgramOrder:
    """Up to which of its rank's releases each program knows what other programs did.

    All that came before the kernel is known to all. Then a flag says it: one that a program of the
    same rank released, in any memory, or one of another rank that knew of it.
    """

    def __init__(self) -> None:
        self._began = 0
        self._known: dict[int, int] = {}  # by program
        self._released: dict[int, int] = {}  # by address of the flag

    def begin(self, count: int) -> None:
        """Begin a kernel, before which there were ``count`` releases."""
        self._began = count
        self._known.clear()
        self._released.clear()

    @property
    def known(self) -> int:
        """Count up to which the running program knows what others did."""
        return self._known.get(interpreter.current_program_number(), self._began)

    def learn(self, count: int) -> None:
        self._known[interpreter.current_program_number()] = max(self.known, count)

    def release(self, flags: Iterable[int], count: int) -> None:
        for flag in flags:
            self._released[flag] = count

    def acquire(self, flags: Iterable[int]) -> None:
        self.learn(max((self._released.get(flag, 0) for flag in flags), default=0))
