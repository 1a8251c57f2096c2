"""Recording of a whole program that knows nothing of it, for ``triton-dist profile``."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from triton_dist import knobs
from triton_dist._tuning.engine.observed import observed
from triton_dist.timelines.marks import compiled_with_marks
from triton_dist.timelines.recording import Recording

ENDING = "json.gz"


class ProgramRecording:
    """Recording of calls ``first`` up to ``last`` of tuned functions, not counting those inside
    others; written at the last or, before that, at the end of the process."""

    def __init__(self, file: Path, first: int, last: int, marks: bool) -> None:
        self._file, self._first, self._last, self._marks = file, first, last, marks
        self._count = 0
        self._recording: Recording | None = None
        self._inside = threading.local()

    @contextmanager
    def around(self, tuned: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        outer = not getattr(self._inside, "call", False)
        if outer:
            if self._count == self._first:
                self._recording = Recording(self._file, marks=self._marks)
                self._recording.start()
            elif self._count == self._last:
                self.stop()
            self._count += 1
        around: AbstractContextManager[None] = nullcontext()
        if self._recording is not None:
            around = self._recording.scopes.around(tuned, args, kwargs)
        elif outer and self._marks and self._count == self._first:
            around = compiled_with_marks()
        self._inside.call = True
        try:
            with around:
                yield
        finally:
            self._inside.call = not outer

    def stop(self) -> None:
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()


def install() -> None:
    """Record this process into the folder that ``TRITON_DIST_PROFILE_DIR`` names."""
    folder = knobs.profile_dir.get()
    if folder is not None:
        first, last = knobs.profile_calls.get()
        file = folder / f"rank-{knobs.rank.get()}.{ENDING}"
        program = ProgramRecording(file, first, last, knobs.profile_marks.get())
        until_the_end = ExitStack()
        until_the_end.callback(program.stop)
        until_the_end.enter_context(observed(program.around))
        atexit.register(until_the_end.close)
