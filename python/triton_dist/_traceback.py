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

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
_SCRIPTS_FOLDER = _PACKAGE_FOLDER + "test" + os.sep
_STDLIB_FOLDER = os.path.dirname(os.__file__) + os.sep


def format_exception(error: BaseException) -> str:
    """Return the traceback of ``error`` and of the exceptions that caused it.

    Unless ``TRITON_DIST_TRACEBACK=full``, consecutive frames inside triton_dist and Triton are
    *folded*: one line replaces them. The innermost frame of the traceback is always shown, except
    for a :class:`TritonDistError`.
    """
    formatted = traceback.TracebackException.from_exception(error)
    if knobs.traceback.get() == "folded":
        _fold(formatted, error)
    return "".join(formatted.format())


def fold_uncaught() -> None:
    """Install an exception hook that folds the traceback and reports the exception to torchrun.

    If the program has installed an exception hook, do nothing.
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
    """Stack whose ``format`` folds consecutive frames among its first ``foldable`` frames."""

    foldable = 0

    def format(self, **options: Any) -> list[str]:
        lines: list[str] = []
        folded: list[bool] = []
        for index, frame in enumerate(self):
            is_of_python = (
                frame.filename.startswith(_STDLIB_FOLDER) and "-packages" not in frame.filename
            )
            # A frame of the standard library is folded after a folded frame.
            is_inside = _is_internal(frame) or (any(folded[-1:]) and is_of_python)
            folded.append(is_inside and index < self.foldable)
        for is_folded, run in itertools.groupby(range(len(self)), folded.__getitem__):
            frames = [self[index] for index in run]
            if is_folded:
                count = f"{len(frames)} frame{'s' * (len(frames) > 1)}"
                lines.append(
                    f"  [{count} of triton_dist or Triton: "
                    f"{knobs.traceback.variable}=full shows all]\n"
                )
            else:
                lines += traceback.StackSummary.from_list(frames).format(**options)
        return lines


def _fold(formatted: traceback.TracebackException, error: BaseException) -> None:
    stack = _FoldedStack(formatted.stack)
    stack.foldable = len(stack) - (not isinstance(error, TritonDistError))
    formatted.stack = stack
    for formatted_cause, cause in (
        (formatted.__cause__, error.__cause__),
        (formatted.__context__, error.__context__),
    ):
        if formatted_cause is not None and cause is not None:
            _fold(formatted_cause, cause)


def _is_internal(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is in Triton or triton_dist, without the test scripts."""
    triton = getattr(sys.modules.get("triton"), "__file__", None)
    if triton and frame.filename.startswith(os.path.dirname(triton) + os.sep):
        return True
    return frame.filename.startswith(_PACKAGE_FOLDER) and not frame.filename.startswith(
        _SCRIPTS_FOLDER
    )
