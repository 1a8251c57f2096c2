"""Issue warnings that point at the line of the user's program that called triton_dist."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_deferred = threading.local()  # ``warnings``: the warnings of this thread that are issued later
_entry_points: set[types.CodeType] = set()


def register_entry_points(functions: Iterable[Callable[..., Any]]) -> None:
    """Declare that ``functions`` are public entry points.

    A warning points at the line that called the innermost entry point on the stack.
    """
    _entry_points.update(function.__code__ for function in functions)


def user_frame() -> types.FrameType:
    """Return the frame that called the innermost entry point on the stack.

    Without an entry point, return the frame of the caller's caller.
    """
    nearest: types.FrameType = sys._getframe(2)
    frame: types.FrameType | None = nearest
    while frame is not None and frame.f_code not in _entry_points:
        frame = frame.f_back
    return (frame and frame.f_back) or nearest


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with control characters escaped, except the characters in ``keep``.

    Use it for text from outside, such as an exception message or a name in a file.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def warn(text: str, category: type[Warning]) -> None:
    """Issue a warning at each call. The caller must avoid repetition."""
    warn_at(user_frame(), text, category)


def warn_without_raising(text: str, category: type[Warning]) -> None:
    """Issue a warning from monitoring code, which must not raise.

    If warnings are errors, print the text instead.
    """
    try:
        warn(text, category)
    except Warning:
        print_line(f"triton_dist: {printable(text)}")


def warn_at(frame: types.FrameType, text: str, category: type[Warning]) -> None:
    """Issue a warning about the line of ``frame``."""
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))
    pending: list[Any] | None = getattr(_deferred, "warnings", None)
    if pending is None:
        _emit(text, category, *where)
    else:
        pending.append((text, category, *where))


@contextmanager
def deferred_warnings() -> Iterator[None]:
    """Context manager that delays the warnings of its block to the end of the block.

    With ``-W error``, a warning raises an exception. Inside a tuning, other ranks would then wait
    in vain, and the winner would not be stored.
    """
    if getattr(_deferred, "warnings", None) is not None:
        yield
        return
    pending: list[Any] = []
    _deferred.warnings = pending
    raised: Warning | None = None
    try:
        yield
    finally:
        _deferred.warnings = None
        for each in pending:
            try:
                _emit(*each)
            except Warning as error:
                raised = raised or error
    if raised is not None:  # not in ``finally``: it must not replace an exception of the block
        try:
            raise raised
        finally:
            raised = None  # break the reference cycle: the warning refers to this frame


def _emit(text: str, category: type[Warning], file: str, line: int, module: str) -> None:
    try:
        warnings.warn_explicit(printable(text, keep="\n"), category, file, line, module)
    except ValueError:
        if sys.stderr is None or not sys.stderr.closed:
            raise


def print_line(text: str) -> None:
    """Print a line to standard error. Do nothing if standard error is closed or has no reader."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
