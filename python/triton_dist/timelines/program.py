"""Recording of a whole program that knows nothing of it, for ``triton-dist profile``."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from triton_dist import knobs
from triton_dist._tuning.engine.dispatch import observed
from triton_dist._warn import note
from triton_dist.errors import ArtefactWarning
from triton_dist.timelines.marks import compiled_with_marks
from triton_dist.timelines.recording import Recording

ENDING = "json.gz"
FAILED = ".failed"
"""Ends the name of a file that says why a timeline is missing."""


class ProgramRecording:
    """Recording of calls ``first`` up to ``last`` of tuned functions, not counting those inside
    others; written at the last or, before that, at the end of the process.

    The program goes on whatever fails here: ``failed`` is a file that then says what. A fork
    records nothing.
    """

    def __init__(self, file: Path, first: int, last: int, marks: bool) -> None:
        self._file, self._first, self._last, self._marks = file, first, last, marks
        self._failed = file.with_name(f"{file.name}{FAILED}")
        self._count = 0
        self._recording: Recording | None = None
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._is_over = False
        os.register_at_fork(after_in_child=self._end)

    @contextmanager
    def around(self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        if self._is_over:
            yield
            return
        outer = not getattr(self._inside, "call", False)
        entered = ExitStack()
        with self._harmless():
            entered.enter_context(self._entered(outer, tuned, args, kwargs))
        self._inside.call = True
        try:
            yield
        finally:
            self._inside.call = not outer
            with self._harmless():
                entered.close()

    def stop(self) -> None:
        with self._lock:
            recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()
            if recording.failure:
                self._fail(recording.failure)

    def _entered(
        self, outer: bool, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AbstractContextManager[None]:
        """Return the context manager that a call is made in."""
        count = self._count
        if outer:
            with self._lock:
                count, self._count = self._count, self._count + 1
                if count == self._first:
                    if torch.autograd._profiler_enabled():  # it would record nothing any more
                        raise RuntimeError("the program uses torch's profiler itself at that time")
                    recording = Recording(self._file, marks=self._marks)
                    recording.start()
                    self._recording = recording
            if count == self._last:
                self.stop()
        if self._recording is not None:
            return self._recording.scopes.around(tuned, args, kwargs)
        if outer and self._marks and count + 1 == self._first:
            return compiled_with_marks()
        return nullcontext()

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._end()
        note(f"triton-dist profile: {why}", ArtefactWarning)
        with suppress(OSError):
            self._failed.write_text(f"process {os.getpid()}: {why}", encoding="utf-8")

    def _end(self) -> None:
        self._is_over, self._recording, self._lock = True, None, threading.Lock()


def install() -> None:
    """Record this process into the folder that ``TRITON_DIST_PROFILE_DIR`` names."""
    folder = knobs.profile_dir.get()
    if folder is not None:
        first, last = knobs.profile_calls.get()
        file = folder / f"rank-{knobs.rank.get()}.{os.getpid()}.{ENDING}"
        program = ProgramRecording(file, first, last, knobs.profile_marks.get())
        until_the_end = ExitStack()
        until_the_end.callback(program.stop)
        until_the_end.enter_context(observed(program.around))
        atexit.register(until_the_end.close)
