"""What the rooms of the tuner look like from outside.

The engine knows these shapes and nothing behind them; ``compose`` picks the implementations. They
are implemented by shape: ``runtime`` never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from triton_dist._tuning.values import (
        Config,
        Fingerprint,
        Key,
        Measurement,
        Outcome,
        Policy,
        TuningRecord,
    )

T = TypeVar("T")


class Timer(Protocol):
    """Times device work between ``start`` and ``stop``; neither blocks the host."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def milliseconds(self) -> float:
        """Elapsed time; call only after the device finished the work."""


class Device(Protocol):
    """The accelerator (or CPU) that this rank's candidates run on."""

    name: str

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait for all queued work; past ``seconds`` raise ``TimeoutError`` instead of waiting
        on."""

    def timer(self) -> Timer: ...
    def hold(self) -> None:
        """Keep the device busy until the host has queued a call behind it."""

    def flush_cache(self) -> None:
        """Evict the last-level cache, on the stream, so that each sample starts cold."""

    def facts(self) -> Mapping[str, str]:
        """Hardware and driver of this rank, as text; part of the fingerprint."""

    def shared_memory_bytes(self) -> int: ...
    def is_capturing(self) -> bool: ...


class RankGroup(Protocol):
    """The ranks that tune together. Every word but the properties is collective over the group.

    ``phase`` names the step in the error that a rank gets when another does not arrive in time.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_leader(self) -> bool: ...
    def facts(self) -> Mapping[str, str]:
        """Size and placement of the group, as text; part of the fingerprint. Not collective."""

    def decide(self, phase: str, value: T | None) -> T:
        """The leader's value, on every rank; what other ranks pass is ignored."""

    def gather(self, phase: str, value: T) -> list[T]:
        """Every rank's value, ordered by rank, on every rank."""

    def all_agree(self, phase: str, flag: bool) -> bool:
        """Whether ``flag`` is true on every rank."""

    def maximum(self, phase: str, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over the ranks: the slowest rank decides."""

    def barrier(self, phase: str) -> None: ...
    def align(self) -> None:
        """Line up the ranks' devices, so that a timed region starts together. Does not block the
        host for longer than it takes the slowest rank to arrive."""


class Search(Protocol):
    """Chooses what to measure next. Deterministic; runs on the leader alone."""

    def ask(self) -> Config | None:
        """The next candidate, or ``None`` when the search is over."""

    def tell(self, config: Config, outcome: Outcome) -> None: ...


class Store(Protocol):
    """Keeps tuning records. A damaged entry is a miss with a warning, never an exception."""

    def get(self, key: Key) -> TuningRecord | None: ...
    def put(self, record: TuningRecord) -> None: ...
    def records(self) -> Iterator[TuningRecord]: ...
    def describe(self, key: Key) -> str:
        """Where the record of ``key`` is kept, in words for a report."""


class Benchmarker(Protocol):
    """Turns a call into samples on this rank."""

    def measure(
        self, call: Callable[[], Any], policy: Policy, align: Callable[[], None]
    ) -> Measurement:
        """Run ``call`` as ``policy`` says; ``align`` lines up the ranks before each timed run."""


class Fingerprinter(Protocol):
    """Says what this rank's result depends on besides the key."""

    def __call__(self, function: Callable[..., Any], space: Sequence[Config]) -> Fingerprint: ...
