"""Warnings of one tuned function, once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triton_dist._warn import called_by_users, user_frame, warn_at
from triton_dist.errors import TuningWarning


class OnceWarnings:
    """Warnings of one tuned function, which point at the user's line.

    Args:
        doors: what users call.
    """

    def __init__(self, doors: Iterable[Any]) -> None:
        called_by_users(doors)
        self._given: set[object] = set()

    def warn(self, text: str, about: object = None) -> None:
        """Once for what it is ``about``; without that, once for each line that calls."""
        user = user_frame()
        about = about or (user.f_code, user.f_lineno)
        if about not in self._given:
            self._given.add(about)
            warn_at(user, text, TuningWarning)
