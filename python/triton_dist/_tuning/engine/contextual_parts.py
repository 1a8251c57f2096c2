"""What a contextual tuning is given, and what its ranks say to one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from triton_dist._tuning.protocols import Device, RankGroup
from triton_dist._tuning.values import Config, ConfigSpace, Fingerprint, Key, TuningRecord
from triton_dist.errors import RankDisagreement, RankTimeout

T = TypeVar("T")


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


class Kernels(Protocol):
    """What is known of kernels across processes."""

    def key(self, name: str, key: tuple[Any, ...]) -> Key: ...
    def fingerprint(self, tuner: Any, space: ConfigSpace) -> Fingerprint: ...
    def find(
        self, key: Key, fingerprint: Fingerprint, configs: Iterable[Config]
    ) -> tuple[str | None, str]:
        """Digest of the winner, one of ``configs``, of a valid record and where that is; or
        ``None`` and why."""

    def put(self, record: TuningRecord) -> str:
        """Keep it; says where."""


class Log(Protocol):
    def line(self, text: str) -> None:
        """Append a line to this rank's file."""

    def say(self, text: str) -> None:
        """The same, and print it on the leader if it was asked to be verbose."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class ContextualParts:
    """What is composed for one tuning; environment variables are read at that time."""

    device: Device
    ranks: RankGroup
    kernels: Kernels
    plan: Callable[[Sequence[Config], int, int], Plan]
    """From candidates, warm-ups and repeats."""
    warmup: int
    repeat: int
    log: Log
    quiet: Callable[[], AbstractContextManager[object]]
    """What the function runs under: waits in kernels are bounded."""
    no_grad: Callable[[], AbstractContextManager[object]]
    gate: AbstractContextManager[object]
    """Held for each word to the other ranks."""
    always_tune: bool
    seconds: float
    """Longest time to wait for the device."""


class Words:
    """What the ranks say to one another during one tuning.

    There is one word, ``gather``. Its phase says where a rank is and is compared: ranks that are
    at different places get an error that says where each of them is.
    """

    def __init__(self, parts: ContextualParts, function: str) -> None:
        self._parts, self._function = parts, function
        self.lost: Exception | None = None
        """Why nothing more can be said: all ranks have left the tuning, or are about to."""

    def gather(self, phase: str, value: T) -> list[T]:
        try:
            with self._parts.gate:
                return self._parts.ranks.gather(f"{self._function}, {phase}", value)
        except (RankTimeout, RankDisagreement) as error:
            raise self.lose(error) from None

    def lose(self, error: Exception) -> Exception:
        """``error`` comes to all ranks: no more words are needed."""
        self.lost = error
        return error
