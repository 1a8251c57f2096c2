"""Parts of a contextual tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from triton_dist._tuning.engine.parts import Common
from triton_dist._tuning.values import Config, ConfigSpace, Fingerprint


class Step(Protocol):
    """One launch."""

    @property
    def config(self) -> Config: ...
    @property
    def timed(self) -> bool: ...


class Plan(Protocol):
    """The launches of one kernel and key, one after another. Told the same, it goes on alike."""

    samples: dict[str, list[float]]
    """Milliseconds, by the digest of each config that has not failed."""

    @property
    def current(self) -> Step | None:
        """``None``: all is known."""

    def tell(self, milliseconds: float) -> None: ...
    def fail(self, digest: str) -> None: ...


class Log(Protocol):
    def line(self, text: str) -> None:
        """Append a line to this rank's file."""

    def say(self, text: str) -> None:
        """The same, and print it on the leader if it was asked to be verbose."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ContextualParts(Common):
    """Parts that are composed for one contextual tuning.

    ``settings.seconds`` is for a call of the function, if the call before was not long itself;
    ``settings.compile_seconds`` also for the first call, which may compile much else.
    """

    fingerprint: Callable[[Any, ConfigSpace], Fingerprint]
    """All that a record of an autotuned kernel with these configs depends on."""
    plan: Callable[[Sequence[Config], int, int], Plan]
    """From candidates, warm-ups and repeats."""
    log: Log
    no_grad: Callable[[], AbstractContextManager[object]]
