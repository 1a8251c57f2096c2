"""Define the interfaces between the tuning engine and its components: device, ranks, store etc.

The engine depends on these protocols only. ``compose`` selects the implementations. Implementations
in ``runtime`` do not import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from triton_dist._tuning.values import (
        Config,
        Failure,
        Fingerprint,
        JournalEntry,
        Key,
        Outcome,
        Request,
        StoredRecord,
        TuningRecord,
    )
    from triton_dist._tuning.values.codec import Tree

T = TypeVar("T")


class Timer(Protocol):
    """Timer of the device work between ``start`` and ``stop``. Neither call blocks the host."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def is_done(self) -> bool:
        """Return whether the device has reached ``stop``, without waiting."""

    def milliseconds(self) -> float:
        """Return the elapsed time. Requires that the device has finished the work."""


class Device(Protocol):
    """The accelerator, or the CPU, that runs the candidates of this rank."""

    name: str

    def synchronize(self, seconds: float | None = None) -> None:
        """Wait for all queued work. Raise ``TimeoutError`` after ``seconds``."""

    def timer(self) -> Timer: ...
    def delay_stream(self, queueing: float = 0.0) -> None:
        """Keep the device busy while the host queues the next call, which took ``queueing`` seconds
        recently."""

    def capture(self, call: Callable[[], Any], seconds: float) -> Callable[[], Any]:
        """Run ``call`` once, capture it in a graph, and return a function that replays the graph.

        Return ``call`` itself on a device that does not queue work.

        Raises:
            TimeoutError: the run did not finish within ``seconds``.
            Exception: ``call`` raised it, or ``call`` cannot be captured.
        """

    def flush_cache(self) -> None:
        """Queue an eviction of the last-level cache: each sample starts with a cold cache."""

    def facts(self) -> Mapping[str, str]:
        """Return hardware and driver of this rank, as text, for the fingerprint of a record."""

    def shared_memory_bytes(self) -> int: ...
    def is_capturing(self) -> bool: ...


class RankGroup(Protocol):
    """The ranks that tune together.

    All ranks must call ``first_all_gather``, ``broadcast`` and ``all_gather`` in the same order.
    ``phase`` is the name of the step that ends with the call. If a rank does not make the call
    within ``seconds``, or is known to have failed, the other ranks raise ``RankTimeout`` with this
    name. If ranks pass different names, they raise ``RankDisagreement``.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_leader(self) -> bool: ...
    def facts(self) -> Mapping[str, str]:
        """Return size and placement of the group, as text, for the fingerprint of a record."""

    def global_rank(self, rank: int) -> int:
        """Return the global rank of ``rank``; with several hosts, its text includes the host."""

    def channel(
        self, function: str = "", key: str = "", call: int = 0, hint: str = ""
    ) -> RankGroup:
        """Return the same ranks for one tuning, whose messages are separate from other tunings.

        Args:
            function: the tuned function, for error messages.
            key: the key that is tuned, for error messages.
            call: number of calls of the function since the ranks last exchanged messages about it.
                It shows whether an error that another rank reported belongs to this call.
            hint: possible reason for missing ranks, for error messages.
        """

    def is_current(self) -> bool:
        """Return ``True`` until the group is destroyed."""

    def abort(self, reason: str, refused: bool = False) -> None:
        """Report, without waiting, why this rank sends no more messages. ``refused``: its call is
        invalid."""

    def note(self, function: str, text: str) -> None:
        """Publish, once per text, why this rank may be missing when other ranks tune."""

    def first_all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """Gather ``value`` from all ranks as the first message of a channel.

        By default, wait as long as a collective of the group. Raise ``RankTimeout`` as soon as it
        is known that a rank will not send this message.
        """

    def broadcast(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        """Return the leader's value on every rank. Values of other ranks are ignored."""

    def all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        """Return the values of all ranks, ordered by rank, on every rank."""

    def pending_values(self) -> tuple[Mapping[int, object], Mapping[int, str]]:
        """Return the values of the ranks that have sent the next message, without sending it.

        The second result has, by rank, the known reason why a rank cannot send it. Any thread may
        call this method.
        """

    def device_barrier(self) -> None:
        """Make the devices of all ranks start the next queued work together.

        It requires a completed ``all_gather`` and does not block the host. Devices first finish the
        work that keeps them busy (``delay_stream``). Without the alignment, such a spin of 0.5 ms
        would end at times that differ by 10 us or more: clocks of GPUs differ by a few percent.
        """


class ThreadValue(Protocol):
    """A value per thread, which a thread that works for another thread may inherit."""

    def get(self) -> Any:
        """Return the value, or ``None``."""

    def put(self, value: object) -> Any:
        """Set the value and return the previous value."""


class Search(Protocol):
    """Strategy that chooses the next measurement. It runs on the leader (rank 0 of the group) only.

    A search must be deterministic: equal outcomes lead to equal requests. To resume an interrupted
    tuning, the outcomes in the journal are passed to a new search.
    """

    @property
    def runs_user_code(self) -> bool:
        """True if ``ask`` runs user code, such as ``prune_fn``, which may be slow."""

    def ask(self) -> Request | None:
        """Return the next request, or ``None`` at the end. Requests may repeat a config."""

    def upcoming_configs(self) -> Sequence[Config]:
        """Return the configs that :meth:`ask` may return next, so that they can be compiled.

        The config that :meth:`ask` returned last is included. Configs that this method returned
        before are not.
        """

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Receive the outcome of ``request``, without the samples of earlier requests."""


class Store(Protocol):
    """Storage of tuning records. A damaged record is skipped with a warning."""

    def find(self, key: Key) -> Iterator[StoredRecord]:
        """Yield the records of ``key``, read one by one, the most likely valid record first."""

    def put(self, record: TuningRecord) -> str:
        """Store ``record`` in place of an earlier record of the key and function.

        Return the location, or an empty text if it cannot be stored.
        """

    def records(self, function: str | None = None) -> Iterator[StoredRecord]:
        """Yield all records, or the records of functions with the bare name ``function``."""


class RemoteStore(Protocol):
    """Records that machines share. No method raises, and each request has a time limit."""

    def find(
        self, key: Key, fingerprint: Fingerprint,
        is_valid: Callable[[TuningRecord], bool], may_wait: bool,
    ) -> StoredRecord | None:  # fmt: skip
        """Return the record of ``key`` if ``is_valid(record)`` is true, else ``None``.

        With ``may_wait``, wait while another job tunes the key.
        """

    def max_find_seconds(self, may_wait: bool) -> float:
        """Return the maximum duration of ``find`` in seconds."""

    def publish(self, record: TuningRecord) -> None: ...
    def release(self, key: Key, fingerprint: Fingerprint) -> None:
        """Let other jobs tune the key. Call it after the tuning that follows :meth:`find`."""


class Journal(Protocol):
    """State of an unfinished tuning of one key, on disk. No method raises.

    ``header`` is a tree that identifies the tuning. ``config`` is the digest of a config.
    """

    def quarantined(self, header: Tree) -> Mapping[str, Failure]:
        """Return, by digest, the configs that are excluded because a rank hung or crashed in them,
        or could not be reset after them."""

    def quarantine(self, header: Tree, config: str, failure: Failure) -> bool:
        """Exclude a config. Return whether the entry was written. Any rank and any thread may call
        this method."""

    def begin(self, header: Tree, record: str | None) -> Sequence[JournalEntry]:
        """On the leader, return the outcomes of an interrupted tuning with an equal ``header``.

        Other entries in the journal are removed: entries with another header, and entries of the
        finished tuning whose record has the digest ``record``.
        """

    def trying(self, config: str) -> None:
        """On the leader, note that a config is about to run and may crash the process."""

    def ended_by_exception(self, config: str) -> None:
        """On the leader, note that the run of a config ended by an exception, not a crash."""

    def append(self, entry: JournalEntry) -> None:
        """On the leader, write ``entry`` in a way that survives the end of the process."""

    def finish(self, record: str) -> None:
        """On the leader, note the end of the tuning and the digest of its record."""

    def remove(self) -> None:
        """Delete the journal, because the record is stored."""

    def close(self) -> None:
        """Release the journal, so that another process can resume the tuning."""


class Log(Protocol):
    """Events of the tunings of one key. No method raises."""

    def event(self, name: str, **fields: Any) -> None:
        """On the leader, write a machine-readable event."""

    def line(self, text: str) -> None:
        """Write a readable line about this rank."""

    def close(self) -> None: ...


class RandomState(Protocol):
    """States of the random number generators, saved when this object is created."""

    def rewind(self, numpy: bool = True) -> None:
        """Restore the saved states. With ``numpy=False``, skip NumPy's generator, the slowest."""

    def has_changed(self) -> bool:
        """Return whether the states of torch's generators have changed since they were saved."""


class Fingerprinter(Protocol):
    """Function that returns what a tuning result depends on, besides the key."""

    def __call__(self, function: Callable[..., Any], space: Sequence[Config]) -> Fingerprint: ...


class Compiler(Protocol):
    """Compiler of kernels in other processes, into a cache that this process reads."""

    @property
    def cache(self) -> str:
        """Identifies the cache. Ranks with equal values share their compiled kernels."""

    def collect(self, prepare: Callable[[], object]) -> list[str]:
        """Return the names of the kernels that ``prepare`` would compile, without compiling."""

    def begin(self, kernels: Sequence[str], num_sharing_ranks: int) -> None:
        """Start to compile ``kernels`` in order, on ``1 / num_sharing_ranks`` of the host's cores.

        ``num_sharing_ranks`` is the number of ranks that share the cache.
        """

    def wait(self, kernel: str) -> None:
        """Wait until ``kernel`` is compiled, if :meth:`begin` started it here. Raise its error."""

    def close(self) -> None:
        """Stop all running compilations."""
