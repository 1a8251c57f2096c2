"""What a contextual tuning is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from triton_dist._tuning.protocols import Compiler, Device, Journal, RankGroup
from triton_dist._tuning.values import Config, ConfigSpace, Fingerprint, Key, TuningRecord


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
    ) -> tuple[TuningRecord | None, str]:
        """A valid record, whose winner is one of ``configs``, and where it is; or ``None`` and
        why."""

    def journal(self, key: Key) -> Journal: ...

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
    settling: Callable[[], AbstractContextManager[Callable[[], None]]]
    """Within, what it gives is called at the end of each call: raises if a wait gave up."""
    no_grad: Callable[[], AbstractContextManager[object]]
    gate: AbstractContextManager[object]
    """Held when a tuning begins, so that the threads of a rank begin one after another."""
    always_tune: bool
    frozen: bool
    """Tuning is forbidden."""
    seconds: float
    """Longest time that a call of the function may take, on the host and on the device, if the call
    before was not long itself."""
    compile_seconds: float
    """The same for compiling a config, and for the first call, which may compile much else."""
    grace: float
    """Time from the report that this rank is stuck to the end of its process."""
    compiler: Callable[[], Compiler] | None
    """``None`` where nothing is compiled."""
