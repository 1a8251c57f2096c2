"""Messages between ranks during one contextual tuning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias, TypeVar

from triton_dist._tuning.engine.contextual.context import Context
from triton_dist._tuning.engine.contextual.parts import ContextualParts
from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.values import Config, Failure

T = TypeVar("T")
Suspect: TypeAlias = Callable[[], tuple[Context, Config] | None]


class Messages(Conversation):
    """There is one message, ``gather``. Its phase says where a rank is and is compared: ranks that
    are at different places get an error that says where each of them is.

    Args:
        suspect: which kernel is at which config now, if one is.
        limit: seconds for the function's current call.
    """

    def __init__(
        self,
        parts: ContextualParts,
        function: str,
        suspect: Suspect,
        limit: Callable[[], float],
    ) -> None:
        with watchdog.paused(), parts.gate():
            limits = (parts.settings.seconds, parts.settings.grace)
            super().__init__(parts.ranks, function, *limits)
        self._suspect, self._call_limit = suspect, limit

    @property
    def limit(self) -> float:
        """Seconds for the function's current call."""
        return self._call_limit()

    def gather(self, at: Situation, value: T, after: float = 0.0) -> list[T]:
        """``after``: how long other ranks may take to come here; default: as long as the call."""
        with watchdog.paused():  # the call's, which is in our code here
            at = replace(at, phase=f"{self._function}, {at.phase}")
            if not self.has_met:
                return self.meet(at, value)
            return super().gather(at, value, after or self.limit)

    def accused(self, at: Situation) -> Config | None:
        suspect = self._suspect()
        return None if suspect is None else suspect[1]

    def quarantine(self, config: Config, failure: Failure) -> None:
        suspect = self._suspect()
        if suspect is not None:
            suspect[0].quarantine(config, failure)
