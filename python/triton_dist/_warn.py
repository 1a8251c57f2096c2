"""Warnings that point at the line of the user's program that they are about."""

from __future__ import annotations

import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_held = threading.local()
_words: set[types.CodeType] = set()


def called_by_users(functions: Iterable[Callable[..., Any]]) -> None:
    """Declare ``functions``: the line that calls the innermost of them is to blame for a warning,
    however deep below it the warning is given, and whatever wraps what lies between."""
    _words.update(function.__code__ for function in functions)


def user_frame() -> types.FrameType:
    """The frame of that line; without one, that of whoever called the caller of this."""
    nearest: types.FrameType = sys._getframe(2)
    frame: types.FrameType | None = nearest
    while frame is not None and frame.f_code not in _words:
        frame = frame.f_back
    return (frame and frame.f_back) or nearest


def printable(text: str, keep: str = "") -> str:
    """Replace each character that a terminal would act on, except those in ``keep``, by its escape.

    For text that others wrote: a message of an exception, a name in a file.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def warn(text: str, category: type[Warning]) -> None:
    """Give a warning, each time; whoever calls says it once."""
    warn_at(user_frame(), text, category)


def note(text: str, category: type[Warning]) -> None:
    """Give a warning from code that watches a program, which must not fail for it: print it where
    warnings are errors."""
    try:
        warn(text, category)
    except Warning:
        print_line(f"triton_dist: {printable(text)}")


def warn_at(frame: types.FrameType, text: str, category: type[Warning]) -> None:
    """Give a warning about a line that is known already."""
    where = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))
    held: list[Any] | None = getattr(_held, "warnings", None)
    if held is None:
        _give(text, category, *where)
    else:
        held.append((text, category, *where))


@contextmanager
def held_warnings() -> Iterator[None]:
    """Context manager that gives the warnings of its block at the end of the block.

    ``-W error`` makes a warning an exception. Raised inside a tuning, it would leave other ranks
    waiting, and the choice that all ranks agreed on would not be stored.
    """
    if getattr(_held, "warnings", None) is not None:
        yield
        return
    held: list[Any] = []
    _held.warnings = held
    raised: Warning | None = None
    try:
        yield
    finally:
        _held.warnings = None
        for each in held:
            try:
                _give(*each)
            except Warning as error:
                raised = raised or error
    if raised is not None:  # not in ``finally``: it must not replace an exception of the block
        try:
            raise raised
        finally:
            raised = None  # the warning holds this frame


def _give(text: str, category: type[Warning], file: str, line: int, module: str) -> None:
    try:
        warnings.warn_explicit(printable(text, keep="\n"), category, file, line, module)
    except ValueError:
        if sys.stderr is None or not sys.stderr.closed:
            raise


def print_line(text: str) -> None:
    """Print a line to standard error, unless it is closed or nobody reads it."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)
