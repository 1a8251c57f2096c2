"""The rooms of the tuner, as they look from outside.

The engine knows these shapes and nothing behind them; ``compose`` picks the implementations. They
are implemented by shape: ``runtime`` never imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from triton_dist._tuning.values import (
        Config,
        Entry,
        Failure,
        Fingerprint,
        Key,
        Outcome,
        Request,
        StoredRecord,
        TuningRecord,
    )
    from triton_dist._tuning.values.codec import Tree

T = TypeVar("T")


class Timer(Protocol):
    """Times device work between ``start`` and ``stop``; neither blocks the host."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def is_done(self) -> bool:
        """True if the device has reached ``stop``; does not wait."""

    def milliseconds(self) -> float:
        """Elapsed time; call only after the device finished the work."""


class Device(Protocol):
    """The accelerator (or CPU) that this rank's candidates run on."""

    name: str

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait for all queued work; past ``seconds`` raise ``TimeoutError`` instead of waiting
        on."""

    def timer(self) -> Timer: ...
    def hold(self, queueing: float = 0.0) -> None:
        """Keep the device busy until the host has queued a call after it.

        queueing: seconds that it has taken for such calls, at most.
        """

    def capture(self, call: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        """Run ``call`` once, then capture it in a graph; returns the replay. Where work is not
        queued there is nothing to capture, and ``call`` itself is returned.

        Raises:
            TimeoutError: the run did not finish within ``seconds``.
            Exception: what ``call`` raised, or why it cannot be captured.
        """

    def flush_cache(self) -> None:
        """Evict the last-level cache, on the stream, so that each sample starts cold."""

    def facts(self) -> Mapping[str, str]:
        """Hardware and driver of this rank, as text; part of the fingerprint."""

    def shared_memory_bytes(self) -> int: ...
    def is_capturing(self) -> bool: ...


class RankGroup(Protocol):
    """The ranks that tune together. ``meet``, ``broadcast`` and ``all_gather`` are messages: all of
    them send each, in the same order.

    ``phase`` names the step in the error, ``RankTimeout``, that a rank gets when another does not
    arrive within ``seconds``, or is known not to come. Ranks in different phases at one step get
    ``RankDisagreement``.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_leader(self) -> bool: ...
    def facts(self) -> Mapping[str, str]:
        """Size and placement of the group, as text; part of the fingerprint."""

    def named(self, rank: int) -> int:
        """The rank of the world that ``rank`` of the group is. Its text says where that is."""

    def channel(
        self, function: str = "", key: str = "", call: int = 0, hint: str = ""
    ) -> RankGroup:
        """The same ranks for one tuning: messages of different conversations never meet.

        ``function`` and ``key``: what it is about, for messages. ``call``: which one of the
        function, since all ranks met in one; by that a rank knows whether another's error is of the
        call that it is in. ``hint``: what may explain that others do not come, for messages.
        """

    def is_current(self) -> bool:
        """True until the group is destroyed."""

    def abort(self, reason: str, refused: bool = False) -> None:
        """Tell the others, without waiting for them, that this rank sends no more messages here.
        ``refused``: because its own call cannot be made."""

    def note(self, function: str, text: str) -> None:
        """Leave a note, once for a text, that may explain to others why this rank does not come."""

    def meet(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """``all_gather`` as the first message of a conversation, which may wait for as long as
        collectives do; ``RankTimeout`` as soon as it is known that a rank stays away."""

    def broadcast(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        """The leader's value, on every rank; what other ranks pass is ignored."""

    def all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """Every rank's value, ordered by rank, on every rank."""

    def others(self) -> tuple[Mapping[int, object], Mapping[int, str]]:
        """Values of ranks that have come to the next message before this one, and reasons for which
        others cannot come there. For any thread; the message need not be about to be sent."""

    def line_up(self) -> None:
        """After a ``all_gather`` to which all ranks came: let the ranks' devices go on together
        with what is queued next. Does not block the host.

        What was queued before, to keep the device busy until the host has queued that, is lined up
        too: a spin of 0.5 ms ends 10 us and more apart on GPUs whose clocks differ by a few
        percent.
        """


class Search(Protocol):
    """Chooses what to measure next; runs on the leader alone.

    Deterministic: with the same outcomes it asks for the same, so that an interrupted tuning is
    resumed by telling a new search what is known already.
    """

    @property
    def runs_user_code(self) -> bool:
        """True if ``ask`` may take as long as the user's code does: ``prune_fn``, or a search of
        the user's own."""

    def ask(self) -> Request | None:
        """The next measurement, or ``None`` when the search is over. The same config may be asked
        for again."""

    def ahead(self) -> Sequence[Config]:
        """Configs that :meth:`ask` may return from now on, the one that it just returned among
        them, and that were not named before: they are compiled meanwhile."""

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Take the outcome of ``request``: its own samples, not those of earlier requests."""


class Store(Protocol):
    """Keeps tuning records. A damaged entry is a miss with a warning, never an exception."""

    def find(self, key: Key) -> Iterator[StoredRecord]:
        """Every record of ``key``, the likeliest to be usable first; lazily, since the first most
        often is."""

    def put(self, record: TuningRecord) -> str:
        """Keep ``record`` in place of what the same function has for the key; says where, in words
        for a report, and nothing if it could not."""

    def records(self) -> Iterator[StoredRecord]: ...
    def records_of(self, key: Key) -> Iterator[StoredRecord]:
        """Records of functions that have the name of the one that ``key`` is of."""


class Journal(Protocol):
    """Knowledge of a tuning of one key so far; outlives the process.

    No operation raises: what cannot be written is not kept.
    """

    def quarantined(self, head: Tree) -> Mapping[str, Failure]:
        """By their digests, the configs that must not be tried again under this ``head``: some
        rank got stuck in them, or was left broken."""

    def quarantine(self, head: Tree, config: str, failure: Failure) -> bool:
        """Add one; by any rank, from any thread. Whether it was written."""

    def begin(self, head: Tree, record: str | None) -> Sequence[Entry]:
        """On the leader: the outcomes of an interrupted tuning with the same ``head``, in order.

        Everything else in the journal is removed: of another head, or of the finished tuning that
        left ``record``, a digest.
        """

    def trying(self, config: str) -> None:
        """On the leader: a config, by its digest, is about to be run; if this process ends before
        its outcome is appended, it may be why."""

    def spared(self, config: str) -> None:
        """On the leader: the tuning ends before its outcome is known, but not because of it."""

    def append(self, entry: Entry) -> None:
        """On the leader: keep ``entry``, whatever becomes of this process."""

    def finish(self, record: str) -> None:
        """On the leader: all is known; its result will be ``record``."""

    def remove(self) -> None:
        """The result is in safety: forget all."""

    def close(self) -> None:
        """Let another process go on with it."""


class Log(Protocol):
    """Events in tunings of one key. No operation raises."""

    def event(self, name: str, **facts: Any) -> None:
        """On the leader, for programs."""

    def line(self, text: str) -> None:
        """A line about this rank, for people."""

    def close(self) -> None: ...


class RandomState(Protocol):
    """States of the random number generators, as they were when this was made."""

    def rewind(self, numpy: bool = True) -> None:
        """Set the generators to these states; ``numpy``: NumPy's too, which takes longest."""

    def has_moved(self) -> bool:
        """True if torch's generators are in other states now."""


class Fingerprinter(Protocol):
    """Says what this rank's result depends on besides the key."""

    def __call__(self, function: Callable[..., Any], space: Sequence[Config]) -> Fingerprint: ...


class Compiler(Protocol):
    """Compiles kernels in other processes, into a cache where this one then finds them."""

    @property
    def cache(self) -> str:
        """Names the cache: ranks with the same text find one another's kernels."""

    def missing(self, prepare: Callable[[], object]) -> list[str]:
        """Names of the kernels that ``prepare`` would compile now; compiles none."""

    def begin(self, kernels: Sequence[str], sharers: int) -> None:
        """Start compiling these, in this order, with one of ``sharers`` parts of the host; besides
        those that were begun before."""

    def wait(self, kernel: str) -> None:
        """Until ``kernel``, if begun here, is in the cache; raises why it cannot be."""

    def close(self) -> None:
        """End whatever is still being compiled."""
