"""Warnings that point at the user's line, once."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterable
from typing import Any

from triton_dist.errors import TuningWarning


class OnceWarnings:
    """Warnings of one tuned function.

    Args:
        words: what users call; the line that called the innermost of them is to blame, however deep
            below it a warning is given, and whatever wraps what lies between.
    """

    def __init__(self, words: Iterable[Any]) -> None:
        self._words = {word.__code__ for word in words}
        self._given: set[object] = set()

    def warn(self, text: str, about: object = None) -> None:
        """Once for what it is ``about``; without that, once for each line that calls."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in self._words:
            frame = frame.f_back
        user = (frame and frame.f_back) or sys._getframe(1)
        about = about or (user.f_code, user.f_lineno)
        if about not in self._given:
            self._given.add(about)
            module = user.f_globals.get("__name__", "")
            where = (user.f_code.co_filename, user.f_lineno, module)
            warnings.warn_explicit(text, TuningWarning, *where)
