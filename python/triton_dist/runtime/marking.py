"""Marks inside kernels: whether kernels make them now, and where these go.

A compiled kernel has either no trace of its marks, or the address of this process's buffer in its
code. Triton's key of compiled kernels has the compiler's options in it, and among those the names
of what instruments kernels: there, a name for the buffer tells the two apart.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton

NAMES = ("wait", "load", "mma", "store", "push")
"""Words of marks; compiled kernels say the place in here."""
MOST = 1 << 18
"""Marks that are kept; further ones are only counted."""
HEAD, WORDS = 4, 3
"""int64 of the buffer before the first mark, of which the first counts; and of a mark: begin, end,
and what ``Mark.of_words`` takes apart."""
_PREFIX = "triton_dist-marks-"
_CODE = 1
"""Another one when what compiled kernels do at a mark changes: no cached one is of the other."""


class Mark(NamedTuple):
    """Time that a program, or four of its warps, took for one thing, by the device's clock."""

    name: str
    program: int
    group: int
    """Number of the four warps."""
    begin_ns: int
    end_ns: int

    @classmethod
    def of_words(cls, begin_ns: int, end_ns: int, what: int) -> Mark:
        return cls(NAMES[what & 0xFF], what >> 32, what >> 8 & 0xFF, begin_ns, end_ns)


class Marks:
    """Memory of ``device`` into which kernels that are launched ``on`` it write; or, interpreted, a
    list (``None``).

    One at a time in a process. Its memory stays for good, as a kernel has the address.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._listed: list[Mark] = []
        self._count = 0
        self._buffer = None if device is None else _buffer(device)
        if self._buffer is not None:
            self._buffer[:HEAD] = 0

    @property
    def address(self) -> int:
        return 0 if self._buffer is None else self._buffer.data_ptr()

    def add(self, mark: Mark) -> None:
        """From an interpreted kernel."""
        self._count += 1
        if len(self._listed) < MOST:
            self._listed.append(mark)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Within, kernels that are launched make marks; may be entered again within."""
        _state.change(self, wanted=1)
        try:
            yield
        finally:
            _state.change(self, wanted=-1)

    def read(self) -> tuple[list[Mark], int]:
        """The marks, once the device is done, and how many were made."""
        if self._buffer is None:
            return list(self._listed), self._count
        count = int(self._buffer[0])
        words = self._buffer[HEAD : HEAD + WORDS * min(count, MOST)].view(-1, WORDS)
        return [Mark.of_words(*each) for each in words.tolist()], count


class _State:
    """State of the process, not of a thread: a kernel that one compiles is another's too."""

    def __init__(self) -> None:
        self.marks: Marks | None = None
        self._lock = threading.Lock()
        self._latest: Marks | None = None
        self._wanted = self._unwanted = 0  # regions that threads are in

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
                names.append(f"{_PREFIX}{_CODE}@{self.marks.address:x}")
            knobs.instrumentation_mode = ",".join(names)


_state = _State()


def current() -> Marks | None:
    """Return where marks go now; ``None``: nobody wants them."""
    return _state.marks


@contextmanager
def off() -> Iterator[None]:
    """Within, no kernel makes marks: candidates are tried."""
    _state.change(unwanted=1)
    try:
        yield
    finally:
        _state.change(unwanted=-1)


@functools.cache
def _buffer(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(HEAD + WORDS * MOST, dtype=torch.int64, device=device)
