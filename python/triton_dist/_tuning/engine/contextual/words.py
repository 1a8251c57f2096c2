"""What the ranks say to one another during one contextual tuning."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from triton_dist._tuning.engine.contextual.context import Context
from triton_dist._tuning.engine.contextual.parts import ContextualParts
from triton_dist._tuning.engine.conversation import Conversation
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.values import Config, Failure

T = TypeVar("T")


class Words(Conversation):
    """There is one word, ``gather``. Its phase says where a rank is and is compared: ranks that are
    at different places get an error that says where each of them is.

    Attributes:
        limit: seconds for the function's current call.
        suspect: which kernel is at which config, if one is.
    """

    def __init__(self, parts: ContextualParts, function: str) -> None:
        with parts.gate:
            super().__init__(parts.ranks, function, parts.seconds, parts.grace)
        self.limit = parts.compile_seconds
        self.suspect: Callable[[], tuple[Context, Config] | None] = lambda: None
        self.quarantine = self._quarantine

    def gather(self, phase: str, value: T, after: float = 0.0) -> list[T]:
        """``after``: how long other ranks may take to come here; default: as long as the call."""
        with watchdog.paused():  # the call's, which is in our code here
            said = f"{self._function}, {phase}"
            if not self.has_met:
                return self.meet(said, value)
            return super().gather(said, value, after or self.limit)

    def lose(self, error: Exception) -> Exception:
        """``error`` comes to all ranks: no more words are needed."""
        self.lost = error
        return error

    def accused(self) -> Config | None:
        suspect = self.suspect()
        return None if suspect is None else suspect[1]

    def _quarantine(self, config: Config, failure: Failure) -> None:
        suspect = self.suspect()
        if suspect is not None:
            suspect[0].quarantine(config, failure)
