"""One kernel with one key: what is left to be tried, what came of it, and the winner."""

from __future__ import annotations

import datetime
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.contextual.own_run import keeps_own_table
from triton_dist._tuning.engine.contextual.parts import Plan
from triton_dist._tuning.protocols import Journal
from triton_dist._tuning.values import (
    Config,
    Entry,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Outcome,
    Trial,
    TuningRecord,
    codec,
)
from triton_dist._tuning.values.outcome import Reduction
from triton_dist.errors import RankTimeout

_ADDRESS = " at 0x"


def triton_key(tuner: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The key under which ``tuner`` caches a launch: ``key=`` arguments, then all dtypes."""
    named = dict(zip(tuner.arg_names, args, strict=False)) | kwargs
    arguments = {name: value for name, value in named.items() if name in tuner.arg_names}
    values = [arguments[name] for name in tuner.keys if name in arguments]
    return (*values, *(str(arg.dtype) for arg in arguments.values() if hasattr(arg, "dtype")))


def kernel_name(tuner: Any) -> str:
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"


def jit_function(tuner: Any) -> Any:
    """The ``JITFunction`` inside; ``None`` if the kernel is interpreted."""
    fn = tuner.fn
    while not isinstance(fn, JITFunction) and hasattr(fn, "fn"):
        fn = fn.fn
    return fn if isinstance(fn, JITFunction) else None


def shown(config: Any) -> str:
    """A ``triton.Config`` without what it does not set."""
    return ", ".join(f"{name}: {value}" for name, value in config.all_kwargs().items())


class Context:
    """Tunes one kernel for one key.

    Attributes:
        live: by digest, the ``triton.Config`` objects of this process.
        winner: the config to use, once it is known.
        tuned: whether the winner was found here, and not loaded.
        recorded: the winner and its record in words, if it was loaded.
    """

    def __init__(
        self, tuner: Any, triton_key: tuple[Any, ...], key: Key, live: dict[str, Any]
    ) -> None:
        self.tuner, self.triton_key, self.key, self.live = tuner, triton_key, key, live
        self.name = f"{kernel_name(tuner)} key {key}"
        self.winner: Any = None
        self.tuned = False
        self.recorded = ""
        self.provisional = False
        """Chosen for one call, because nothing could be tuned."""
        self.compiled: set[str] = set()
        self.ahead: CompileAhead | None = None
        self._in_own_table = keeps_own_table(tuner)
        self.failures: dict[str, Failure] = {}
        self.launches: Counter[str] = Counter()
        """Number of launches of each config as a step, by digest."""
        self.record: TuningRecord | None = None
        self.candidates: Sequence[Config] = ()
        self._journal: Journal | None = None
        self._head: codec.Tree = {}
        self._noted = 0
        self._trying = ""
        self._began = time.monotonic()

    @property
    def can_persist(self) -> bool:
        """True if the key means the same in another process."""
        return _ADDRESS not in self.key.text

    def begin(
        self,
        candidates: Sequence[Config],
        pruned: Sequence[tuple[Config, str]],
        fingerprint: Fingerprint,
        plan: Plan,
        warmup: int,
    ) -> None:
        self.candidates, self.plan = candidates, plan
        self._pruned, self._fingerprint, self._warmup = pruned, fingerprint, warmup

    def use(self, winner: Any) -> None:
        """From now on launches take ``winner``, in this function and outside of it."""
        self.winner = winner
        self.bind()

    def bind(self) -> None:
        if not self.provisional and not self._in_own_table:
            self.tuner.cache[self.triton_key] = self.winner

    def unbind(self) -> None:
        """Launches outside of the function choose for themselves again."""
        if not self._in_own_table:
            self.tuner.cache.pop(self.triton_key, None)

    def use_once(self, config: Any) -> None:
        self.winner, self.provisional = config, True

    def keep(self, journal: Journal, head: codec.Tree) -> None:
        """From now on note in ``journal`` what is learnt. On the leader it was begun."""
        self._journal, self._head = journal, head

    def resume(self, entries: Sequence[Entry]) -> None:
        """Take over what an interrupted tuning has learnt, the same on all ranks. Untimed steps
        were not noted: those before a timed one were taken."""
        for entry in entries:
            while self._is_warming(entry.config):
                self._step(entry.config, 0.0)
            current = self.plan.current
            if isinstance(entry.outcome, Failure):
                self.failures[entry.config] = entry.outcome
                self.plan.fail(entry.config)
            elif current is not None and current.config.digest == entry.config:
                self._step(entry.config, entry.outcome.samples[0])
            else:  # it went another way, which this one does not take
                return
            self._noted += 1

    def trying(self, digest: str) -> None:
        """It may end this process."""
        if self._journal is not None and not self.launches[digest]:
            self._journal.trying(digest)
            self._trying = digest

    def _is_warming(self, digest: str) -> bool:
        step = self.plan.current
        return step is not None and step.config.digest == digest and not step.timed

    def _step(self, digest: str, milliseconds: float) -> None:
        self.launches[digest] += 1
        self.plan.tell(milliseconds)

    def tell(self, digest: str, milliseconds: float, reduction: Reduction) -> None:
        """The plan's current step was taken, on all ranks."""
        timed = self.plan.current is not None and self.plan.current.timed
        self._step(digest, milliseconds)
        if timed:
            self._note(digest, Measurement((milliseconds,), 0, reduction))

    def fail(self, digest: str, failure: Failure) -> None:
        """A config, not always the current one, cannot be used on some rank."""
        if digest in self.failures:
            return
        self.failures[digest] = failure
        self.plan.fail(digest)
        self._note(digest, failure)

    def _note(self, digest: str, outcome: Outcome) -> None:
        if self._journal is not None:
            seconds = time.monotonic() - self._began
            self._journal.append(Entry(self._noted, digest, 1, outcome, seconds))
            self._noted += 1

    def quarantine(self, config: Config, failure: Failure) -> None:
        """By any thread: do not try ``config`` in the next start."""
        if self._journal is not None:
            self._journal.quarantine(self._head, config.digest, failure)

    def close(self, error: BaseException | None) -> None:
        """The tuning of this kernel and key is over; without an ``error`` nothing is left to be
        gone on with."""
        if self.ahead is not None:
            self.ahead.close()
        journal, self._journal = self._journal, None
        if journal is None:
            return
        if error is None:
            journal.remove()
        elif self._trying and not isinstance(error, RankTimeout):
            journal.spared(self._trying)
        journal.close()

    def fallbacks(self, digest: str) -> Iterator[Config]:
        """Configs that may run in place of ``digest``: fastest so far first, then in order."""
        left = [c for c in self.candidates if c.digest not in self.failures and c.digest != digest]
        samples = self.plan.samples
        yield from sorted(left, key=lambda c: min(samples[c.digest], default=float("inf")))

    def finish(self, reduction: Reduction) -> TuningRecord:
        """All is known: the winner, and the record of how it was found.

        Raises:
            NoValidConfig: every config failed; holds each cause.
        """
        trials = [Trial.of(c, self._outcome(c.digest, reduction)) for c in self.candidates]
        trials += [Trial.of(c, Failure("pruned", reason)) for c, reason in self._pruned]
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        seconds = time.monotonic() - self._began
        self.record = TuningRecord(self.key, self._fingerprint, tuple(trials), now, seconds)
        self.use(self.live[self.record.best.digest])
        self.tuned = True
        if self._journal is not None:
            self._journal.finish(self.record.digest)
        return self.record

    def _outcome(self, digest: str, reduction: Reduction) -> Outcome:
        failure = self.failures.get(digest)
        if failure is not None:
            return failure
        return Measurement(tuple(self.plan.samples[digest]), self._warmup, reduction)

    def publish(self) -> None:
        """Leave what Triton's own tuning leaves: timings on the kernel, in its disk cache, for a
        listener and for who set ``TRITON_PRINT_AUTOTUNING``."""
        tuner, record = self.tuner, self.record
        if record is None:
            return
        timings = {
            self.live[trial.digest]: [trial.outcome.median] * 3
            for trial in record.trials
            if isinstance(trial.outcome, Measurement)
        }
        tuner.bench_time, tuner.configs_timings = record.seconds, timings
        if tuner.cache_results and not self._in_own_table:
            tuner.check_disk_cache(self.triton_key, self._live_candidates(), lambda: None)
            tuner.configs_timings = timings  # those of an older entry, if it had one
            self.bind()
        listener = getattr(triton.knobs.autotuning, "listener", None)
        if listener is not None:  # Triton 3.8 and later
            listener(
                fn=jit_function(tuner) or tuner.fn,
                key=self.triton_key,
                best_config=self.winner,
                configs_timings=tuner.configs_timings,
                duration=record.seconds,
                cache_hit=False,
            )
        if triton.knobs.autotuning.print:
            print(
                f"Triton autotuning for function {tuner.base_fn.__name__},\n"
                f"with key as {self.triton_key},\nfinished after {record.seconds:.2f}s,\n"
                f"best config selected: {self.winner};",
                flush=True,
            )

    def _live_candidates(self) -> list[Any]:
        return [self.live[config.digest] for config in self.candidates]


class _NotCached(Exception):
    pass


def triton_disk_winner(tuner: Any, key: tuple[Any, ...], candidates: list[Any]) -> Any:
    """The config in the kernel's own ``cache_results`` on disk for ``key``, or ``None``."""

    def not_cached() -> None:
        raise _NotCached

    if not tuner.cache_results or keeps_own_table(tuner):
        return None
    try:
        tuner.check_disk_cache(key, candidates, not_cached)
    except _NotCached:
        return None
    return tuner.cache.pop(key)
