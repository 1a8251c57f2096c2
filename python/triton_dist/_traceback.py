"""Format exceptions without the stack frames inside triton_dist and Triton."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
import types
from contextlib import suppress
from typing import Any

from triton_dist import knobs
from triton_dist._warn import print_line
from triton_dist.errors import TritonDistError, original_error

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SCRIPTS = _PACKAGE + "test" + os.sep
_LIBRARY = os.path.dirname(os.__file__) + os.sep


def format_exception(error: BaseException) -> str:
    """Return the traceback of ``error`` and of the exceptions that caused it.

    Consecutive frames inside triton_dist and Triton become one line, unless
    ``TRITON_DIST_TRACEBACK=full``. The innermost frame is shown, except for errors that triton_dist
    raises deliberately.
    """
    shown = traceback.TracebackException.from_exception(error)
    if knobs.traceback.get() == "folded":
        _fold(shown, error)
    return "".join(shown.format())


def fold_uncaught() -> None:
    """Fold the traceback of an uncaught exception of this process, and report it to torchrun.

    An exception hook that the program has installed is kept.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_uncaught


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    print_line(format_exception(error.with_traceback(trace)).rstrip())
    file, cause = knobs.error_file.get(), original_error(error)
    if file is not None:
        text = "".join(traceback.format_exception_only(type(cause), cause)).strip()
        with suppress(OSError):
            file.write_text(json.dumps({"message": text, "timestamp": int(time.time())}))


class _FoldedStack(traceback.StackSummary):
    """Stack whose ``format`` folds runs of frames among its first ``foldable`` frames."""

    foldable = 0

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        inside: list[bool] = []
        for place, frame in enumerate(self):
            ours = _is_ours(frame) or (any(inside[-1:]) and _is_of_python(frame))
            inside.append(ours and place < self.foldable)
        for folded, run in itertools.groupby(range(len(self)), inside.__getitem__):
            frames = [self[place] for place in run]
            if folded:
                count = f"{len(frames)} frame{'s' * (len(frames) > 1)}"
                lines.append(
                    f"  [{count} of triton_dist or Triton: "
                    f"{knobs.traceback.variable}=full shows all]\n"
                )
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _fold(shown: traceback.TracebackException, error: BaseException) -> None:
    """Fold the stacks of ``error`` and of the exceptions that caused it."""
    stack = _FoldedStack(shown.stack)
    stack.foldable = len(stack) - (not isinstance(error, TritonDistError))
    shown.stack = stack
    for before, its_error in (
        (shown.__cause__, error.__cause__),
        (shown.__context__, error.__context__),
    ):
        if before is not None and its_error is not None:
            _fold(before, its_error)


def _is_of_python(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is in the standard library.

    These frames are folded if they directly follow a folded frame.
    """
    return frame.filename.startswith(_LIBRARY) and "-packages" not in frame.filename


def _is_ours(frame: traceback.FrameSummary) -> bool:
    triton = getattr(sys.modules.get("triton"), "__file__", None)
    if triton and frame.filename.startswith(os.path.dirname(triton) + os.sep):
        return True
    return frame.filename.startswith(_PACKAGE) and not frame.filename.startswith(_SCRIPTS)
