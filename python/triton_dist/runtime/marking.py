"""Marks inside kernels: whether kernels make marks, and the buffer that receives the marks.

A compiled kernel either contains no marks, or contains the address of this process's buffer as a
constant. Triton's cache key includes the names of instrumentation modes, so a mode name for the
buffer separates the two variants.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton

MARK_NAMES = ("wait", "load", "mma", "store", "push", "notify")
"""Names of marks; compiled kernels store the index in this tuple."""
FLAG_AWAITED, FLAG_SET = len(MARK_NAMES), len(MARK_NAMES) + 1
"""Indices that compiled kernels store for a flag that a wait has seen, and for a flag that is
set."""
MAX_MARKS = 1 << 18
"""Maximum number of stored marks; further marks are only counted."""
HEADER_WORDS, WORDS_PER_MARK = 4, 4
"""Number of int64 words before the first mark (word 0 counts marks), and per mark: begin, end, a
packed word that ``_of_words`` decodes, and nothing; for a flag: time, address, packed, value."""
_PREFIX = "triton_dist-marks-"
_CODE_VERSION = 2
"""Version of the code that kernels run at a mark; a change invalidates cached kernels."""


class Mark(NamedTuple):
    """A time span of a program, or of four of its warps, on the device's clock."""

    name: str
    program: int
    group: int
    """Index of the group of four warps."""
    begin_ns: int
    end_ns: int
    nbytes: int = 0
    """Size of a copy by a copy stream of CPU ranks, whose ``program`` is negative."""


class Flag(NamedTuple):
    """A flag that a program has set, or has seen at the end of a wait."""

    is_set: bool
    program: int
    group: int
    at_ns: int
    """Time within the mark "notify" or "push", or "wait"; before the flag is set."""
    address: int
    value: int
    """Value that the flag gets, or the awaited value."""


def _of_words(first: int, second: int, what: int, value: int) -> Mark | Flag:
    kind, group, program = what & 0xFF, what >> 8 & 0xFF, what >> 32
    if kind < len(MARK_NAMES):
        return Mark(MARK_NAMES[kind], program, group, first, second)
    return Flag(kind == FLAG_SET, program, group, first, second, value)


class Marks:
    """The buffer of ``device`` for marks of kernels; for interpreted kernels (``None``) a list.

    A process has one at a time. Its memory is never freed, because compiled kernels contain its
    address.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._listed: list[Mark | Flag] = []
        self._count = 0
        self._buffer = None if device is None else _buffer(device)
        if self._buffer is not None:
            self._buffer[:HEADER_WORDS] = 0

    @property
    def address(self) -> int:
        return 0 if self._buffer is None else self._buffer.data_ptr()

    def add(self, mark: Mark | Flag) -> None:
        """Add a mark or flag of an interpreted kernel, or of a copy stream of CPU ranks."""
        self._count += 1
        if len(self._listed) < MAX_MARKS:
            self._listed.append(mark)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context manager in which launched kernels make marks; reentrant."""
        _state.change(self, wanted=1)
        try:
            yield
        finally:
            _state.change(self, wanted=-1)

    def read(self) -> tuple[list[Mark | Flag], int]:
        """Wait for the device; return the stored marks and the number of marks that were made."""
        if self._buffer is None:
            return list(self._listed), self._count
        count = int(self._buffer[0])
        words = self._buffer[
            HEADER_WORDS : HEADER_WORDS + WORDS_PER_MARK * min(count, MAX_MARKS)
        ].view(-1, WORDS_PER_MARK)
        return [_of_words(*each) for each in words.tolist()], count


class _State:
    """The state of the process; not per thread, because threads share compiled kernels."""

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self._lock = threading.Lock()
        self._latest: Marks | None = None
        self._wanted = self._unwanted = 0  # number of active regions of all threads

    def change(self, marks: Marks | None = None, wanted: int = 0, unwanted: int = 0) -> None:
        with self._lock:
            self._latest = marks or self._latest
            self._wanted += wanted
            self._unwanted += unwanted
            self.marks = self._latest if self._wanted and not self._unwanted else None
            knobs = triton.knobs.compilation
            others = knobs.instrumentation_mode.split(",")
            names = [name for name in others if name and not name.startswith(_PREFIX)]
            if self.marks is not None and self.marks.address:
                names.append(f"{_PREFIX}{_CODE_VERSION}@{self.marks.address:x}")
            knobs.instrumentation_mode = ",".join(names)


_state = _State()


def current() -> Marks | None:
    """Return the active buffer; ``None``: kernels make no marks."""
    return _state.marks


@contextmanager
def off() -> Iterator[None]:
    """Context manager in which no kernel makes marks; the tuner uses it for candidates."""
    _state.change(unwanted=1)
    try:
        yield
    finally:
        _state.change(unwanted=-1)


@functools.cache
def _buffer(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(
            HEADER_WORDS + WORDS_PER_MARK * MAX_MARKS, dtype=torch.int64, device=device
        )
