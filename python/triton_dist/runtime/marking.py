"""Switch marks in kernels on and off, and read the marks from the buffer that kernels store to.

A mark is a named time span within a kernel, for a timeline. A kernel is compiled either without
marks, or with the address of this process's buffer as a constant. Triton's cache key includes
``knobs.compilation.instrumentation_mode``. While marks are on, that knob contains a name with the
buffer's address, so the two variants have different cache keys.
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
"""Names of marks. Compiled kernels store the index of the name in this tuple."""
FLAG_AWAITED, FLAG_SET = len(MARK_NAMES), len(MARK_NAMES) + 1
"""Indices that compiled kernels store for a received flag, and for a flag that is set."""
MAX_MARKS = 1 << 18
"""Maximum number of stored marks; further marks are only counted."""
HEADER_WORDS, WORDS_PER_MARK = 4, 4
"""Sizes in int64 words of the buffer's header, whose word 0 counts marks, and of each mark after
it. A mark has begin, end, a packed word and an unused word. A flag has time, address, a packed word
and its value. ``_decode`` reads the packed word."""
_MODE_PREFIX = "triton_dist-marks-"
_CODE_VERSION = 2
"""Version of the code that marks add to kernels. A new version invalidates cached kernels."""


class Mark(NamedTuple):
    """A time span of one group of four warps of a program, on the device's clock."""

    name: str
    program: int
    """Program id; negative for the copy streams of CPU ranks."""
    warp_group: int
    """Index of the group of four warps in the program."""
    begin_ns: int
    end_ns: int
    nbytes: int = 0
    """Size of a copy by a copy stream; otherwise 0."""


class FlagEvent(NamedTuple):
    """A flag that a program sets, or has received at the end of a wait."""

    is_set: bool
    program: int
    warp_group: int
    time_ns: int
    """Time: just before the flag is set, within the mark "notify" or "push"; or after it was
    received, within the mark "wait"."""
    address: int
    value: int
    """Value to which the flag is set, or the awaited value."""


def _decode(first: int, second: int, packed: int, value: int) -> Mark | FlagEvent:
    event_id, warp_group, program = packed & 0xFF, packed >> 8 & 0xFF, packed >> 32
    if event_id < len(MARK_NAMES):
        return Mark(MARK_NAMES[event_id], program, warp_group, first, second)
    return FlagEvent(event_id == FLAG_SET, program, warp_group, first, second, value)


class Marks:
    """A buffer on ``device`` for marks of compiled kernels; without a device, a list for marks of
    interpreted kernels.

    All objects of a device use one buffer. It is never freed: compiled kernels have its address.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._interpreted: list[Mark | FlagEvent] = []
        self._count = 0
        self._buffer = None if device is None else _buffer(device)
        if self._buffer is not None:
            self._buffer[:HEADER_WORDS] = 0

    @property
    def address(self) -> int:
        return 0 if self._buffer is None else self._buffer.data_ptr()

    def add(self, mark: Mark | FlagEvent) -> None:
        """Add a mark or flag of an interpreted kernel, or of a copy stream of CPU ranks."""
        self._count += 1
        if len(self._interpreted) < MAX_MARKS:
            self._interpreted.append(mark)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context manager in which launched kernels store marks here. Reentrant."""
        _state.change(self, on_change=1)
        try:
            yield
        finally:
            _state.change(self, on_change=-1)

    def read(self) -> tuple[list[Mark | FlagEvent], int]:
        """Wait for the device. Return the stored marks, and the number of marks including those
        after ``MAX_MARKS``, which are not stored."""
        if self._buffer is None:
            return list(self._interpreted), self._count
        count = int(self._buffer[0])
        words = self._buffer[
            HEADER_WORDS : HEADER_WORDS + WORDS_PER_MARK * min(count, MAX_MARKS)
        ].view(-1, WORDS_PER_MARK)
        return [_decode(*each) for each in words.tolist()], count


class _State:
    """The active buffer. It is the same for all threads, because they share compiled kernels."""

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self._lock = threading.Lock()
        self._latest: Marks | None = None
        self._on_count = self._off_count = 0  # active contexts ``on`` and ``off`` of all threads

    def change(self, marks: Marks | None = None, on_change: int = 0, off_change: int = 0) -> None:
        with self._lock:
            self._latest = marks or self._latest
            self._on_count += on_change
            self._off_count += off_change
            self.marks = self._latest if self._on_count and not self._off_count else None
            knobs = triton.knobs.compilation
            modes = knobs.instrumentation_mode.split(",")
            names = [name for name in modes if name and not name.startswith(_MODE_PREFIX)]
            if self.marks is not None and self.marks.address:
                names.append(f"{_MODE_PREFIX}{_CODE_VERSION}@{self.marks.address:x}")
            knobs.instrumentation_mode = ",".join(names)


_state = _State()


def current() -> Marks | None:
    """Return the active buffer, or ``None`` while kernels make no marks."""
    return _state.marks


@contextmanager
def off() -> Iterator[None]:
    """Context manager in which no kernel makes marks. The tuner measures candidates in it."""
    _state.change(off_change=1)
    try:
        yield
    finally:
        _state.change(off_change=-1)


@functools.cache
def _buffer(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(
            HEADER_WORDS + WORDS_PER_MARK * MAX_MARKS, dtype=torch.int64, device=device
        )
