"""One kernel with one key: how ranks begin with it, its candidates, outcomes and winner."""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import triton
from triton.runtime.jit import JITFunction

from triton_dist._tuning.engine.agreement import (
    Agreement,
    OwnRecord,
    Proposal,
    Verdict,
    own_record,
)
from triton_dist._tuning.engine.channel import Channel, Step, timestamp
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.contextual.launch import keeps_own_table
from triton_dist._tuning.engine.parts import Common
from triton_dist._tuning.engine.progress import head_of, journal_head
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import Journal
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Entry,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Outcome,
    Trial,
    TuningRecord,
    codec,
    told_apart,
    validity,
)
from triton_dist._tuning.values.outcome import Reduction
from triton_dist._warn import warn
from triton_dist.errors import (
    InvalidArgument,
    NoValidConfig,
    RankTimeout,
    TuningFrozen,
    TuningWarning,
)


class LaunchStep(Protocol):
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
    def current(self) -> LaunchStep | None:
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
        # Known once the ranks have met, if the context has to be tuned.
        self.fingerprint: Fingerprint
        self.plan: Plan
        self.warmup = 0
        self.candidates: Sequence[Config] = ()
        self.pruned: Sequence[tuple[Config, str]] = ()
        self._journal: Journal | None = None
        self._head: codec.Tree = {}
        self._noted = 0
        self._trying = ""
        self._began = time.monotonic()

    @property
    def can_persist(self) -> bool:
        """True if the key means the same in another process."""
        return _ADDRESS not in self.key.text

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

    def resume(
        self, record: TuningRecord | None, parts: ContextualParts, messages: Messages, call: int
    ) -> None:
        """Go on where an interrupted tuning stopped, the same on all ranks, without the configs
        that some rank got stuck in. Ranks on other hosts may have cache folders of their own.

        Args:
            record: the record that is replaced.
        """
        head = journal_head(self.key, self.fingerprint, head_of(self.candidates))
        journal = parts.journal(self.key)
        stuck, entries = dict(journal.quarantined(head)), list[Entry]()
        if parts.ranks.is_leader:
            entries = list(journal.begin(head, None if record is None else record.digest))
        at = Step(f"call {call}: journal of {self.name}")
        everyone = messages.all_gather(at, (stuck, entries))
        for entry in next((leaders for _, leaders in everyone if leaders), []):
            # Untimed steps were not noted: those before a timed one were taken.
            while (step := self.plan.current) is not None and not step.timed:
                if step.config.digest != entry.config:
                    break
                self._step(entry.config, 0.0)
            if isinstance(entry.outcome, Failure):
                self.failures[entry.config] = entry.outcome
                self.plan.fail(entry.config)
            elif step is not None and step.config.digest == entry.config:
                self._step(entry.config, entry.outcome.samples[0])
            else:  # it went another way, which this one does not take
                break
            self._noted += 1
        self._journal, self._head = journal, head
        for quarantined, _ in reversed(everyone):  # the lowest rank's counts
            for digest, failure in quarantined.items():
                self.fail(digest, failure)

    def trying(self, digest: str) -> None:
        """It may end this process."""
        if self._journal is not None and not self.launches[digest]:
            self._journal.trying(digest)
            self._trying = digest

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
        trials += [Trial.of(c, Failure("pruned", reason)) for c, reason in self.pruned]
        seconds = time.monotonic() - self._began
        self.record = TuningRecord(self.key, self.fingerprint, tuple(trials), timestamp(), seconds)
        self.use(self.live[self.record.best.digest])
        self.tuned = True
        if self._journal is not None:
            self._journal.finish(self.record.digest)
        return self.record

    def _outcome(self, digest: str, reduction: Reduction) -> Outcome:
        failure = self.failures.get(digest)
        if failure is not None:
            return failure
        return Measurement(tuple(self.plan.samples[digest]), self.warmup, reduction)

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
            live = [self.live[config.digest] for config in self.candidates]
            tuner.check_disk_cache(self.triton_key, live, lambda: None)
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


T = TypeVar("T")
Suspect: TypeAlias = Callable[[], tuple[Context, Config] | None]


class Messages(Channel):
    """Messages of one contextual tuning. All are a ``all_gather``, whose phase is compared: ranks
    at different places get an error that names the place of each.

    Args:
        suspect: which kernel is at which config now, if one is.

    Attributes:
        limit: seconds for the function's current call.
    """

    def __init__(self, parts: ContextualParts, function: str, suspect: Suspect) -> None:
        with watchdog.paused(), parts.tuning_lock():
            super().__init__(parts.ranks, function, parts.settings.seconds, parts.settings.grace)
        self._suspect, self.limit = suspect, parts.settings.compile_seconds

    def all_gather(self, at: Step, value: T, after: float = 0.0) -> list[T]:
        """``after``: how long other ranks may take to come here; default: as long as the call."""
        with watchdog.paused():  # the call's, which is in our code here
            at = replace(at, phase=f"{self._function}, {at.phase}")
            if not self.has_met:
                return self.meet(at, value)
            return super().all_gather(at, value, after or self.limit)

    def blamed_config(self, at: Step) -> Config | None:
        suspect = self._suspect()
        return None if suspect is None else suspect[1]

    def quarantine(self, config: Config, failure: Failure) -> None:
        suspect = self._suspect()
        if suspect is not None:
            suspect[0].quarantine(config, failure)


def as_config(config: Any) -> Config:
    """A ``triton.Config`` as the tuner's; a hook that has no stable text, or is a partial, which
    may bind the rank, counts by its name."""
    if isinstance(config.pre_hook, functools.partial) or not codec.is_exact(config.pre_hook, False):
        bare = copy.copy(config)
        bare.pre_hook = None
        hook = getattr(config.pre_hook, "__qualname__", type(config.pre_hook).__qualname__)
        return Config({"config": bare, "pre_hook": hook})
    return Config({"config": config})


def open_context(
    tuner: Any,
    triton_key: tuple[Any, ...],
    prune: Callable[[], list[Any]],
    parts: ContextualParts,
    messages: Messages,
    call: int,
) -> Context:
    """The context, on all ranks: done, if there is a record of it, or at its beginning.

    Args:
        prune: the live configs that the kernel's own pruning leaves for this launch.
        call: number of the function's call, for errors.

    Raises:
        RankDisagreement: ranks launch different kernels, or come with other keys, configs or
            sources; on every rank.
        RankTimeout: a rank launches none.
        InvalidArgument: a buffer to reset or restore is no argument of the kernel.
        NoValidConfig: the leader's pruning leaves nothing.
    """
    name = kernel_name(tuner)
    _check_names(name, tuner)
    own = _Own(tuner, prune)
    key = Key.of(name, tuple(map(_with_text, triton_key)), parts.hardware)
    fingerprint = parts.fingerprint(tuner, own.space)
    context = Context(tuner, triton_key, key, own.live)
    found = OwnRecord(None, "its key has no text that another process would understand")
    if context.can_persist:
        strict, configs = parts.settings.strict, ConfigSpace(own.configs.values())
        stored = parts.store.find(key.under(fingerprint))
        found = own_record(stored, lambda record: validity(record, fingerprint, configs, strict))
    verdict = found.verdict
    if found.record is None:
        verdict = Verdict(own.winner_on_disk(triton_key))
    compared = [
        (f"the pruning of {context.name}", own.failure_text),
        (f"the configs of {context.name}", f"{len(own.space)} configs, digest {own.space.digest}"),
    ]
    proposal = Proposal(
        compared,
        fingerprint,
        verdict,
        always_tune=parts.settings.always_tune,
        frozen=parts.settings.frozen,
        capturing=parts.device.is_capturing(),
        kept=[config.digest for config in own.kept],
    )
    proposals = messages.all_gather(Step(f"call {call}: launch of {context.name}"), proposal)
    if own.failure is not None:
        raise messages.ended_by(own.take_failure())
    agreement = Agreement(messages, context.name, proposals)
    context.key = key.under(agreement.fingerprint)
    if agreement.winner is not None:
        context.use(own.live[agreement.winner])
        context.recorded = f"config {shown(context.winner)} of the tuning record {found.where}"
        parts.log.say(f"{context.name}: known, {shown(context.winner)}")
        return context
    leader, policy = agreement.leader, parts.settings.policy
    kept = [own.configs[digest] for digest in leader.kept if digest in own.configs]
    if len(kept) < len(leader.kept):
        raise LookupError(f"{context.name}: the leader's pruning made configs that this rank lacks")
    pruned = [(c, "pruned by the kernel") for c in own.space if c.digest not in leader.kept]
    if not kept:
        causes = {str(config): reason for config, reason in pruned}
        raise messages.ended_by(NoValidConfig(context.name, context.key, causes))
    if agreement.frozen and len(kept) > 1:
        key, frozen = context.key, agreement.frozen
        raise messages.ended_by(TuningFrozen(key.full_name, key, key.hardware, found.where, frozen))
    if agreement.capturing:
        context.winner, context.provisional = own.live[kept[0].digest], True
        warn(
            f"{context.name}: not tuned yet, and cannot be during CUDA-graph capture; its first "
            "config is used. Call the function once before.",
            TuningWarning,
        )
        return context
    context.candidates, context.pruned, context.fingerprint = kept, pruned, agreement.fingerprint
    context.plan = parts.plan(kept, policy.warmup, policy.repeat)
    context.warmup = policy.warmup
    if len(kept) == 1:
        context.use(own.live[kept[0].digest])  # nothing to choose from
    elif context.can_persist:
        context.resume(found.record, parts, messages, call)
    reason = "told to tune always" if leader.always_tune else found.where
    ranks = parts.ranks.size
    parts.log.say(
        f"{context.name}: {reason}; tuning {len(kept)} configs ({len(pruned)} pruned) on "
        f"{ranks} rank{'' if ranks == 1 else 's'}"
    )
    return context


class _NotCached(Exception):
    pass


class _Own:
    """Configs of this rank, and what its pruning makes of them."""

    def __init__(self, tuner: Any, prune: Callable[[], list[Any]]) -> None:
        self._tuner = tuner
        self.failure: Exception | None = None
        """The exception that its pruning raised."""
        pruned: list[Any] = []
        try:
            pruned = prune()
        except Exception as error:
            self.failure = error
        configs = told_apart(map(as_config, tuner.configs))
        pairs = list(zip(configs, tuner.configs, strict=True))
        known = {id(live): config for config, live in pairs}
        self.space = ConfigSpace(configs)
        kept = [(known.get(id(live)) or as_config(live), live) for live in pruned]
        self.live = {config.digest: live for config, live in [*kept, *pairs]}
        self.configs = {config.digest: config for config, _ in [*kept, *pairs]}
        self.kept = list({config.digest: config for config, _ in kept}.values())

    def take_failure(self) -> Exception:
        """The failure, which holds frames that hold this."""
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure

    @property
    def failure_text(self) -> str:
        return "done" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"

    def winner_on_disk(self, triton_key: tuple[Any, ...]) -> str | None:
        """Return the digest of the winner in the kernel's own ``cache_results``, if there is
        one."""
        tuner = self._tuner
        if not tuner.cache_results or keeps_own_table(tuner):
            return None

        def not_cached() -> None:
            raise _NotCached

        try:
            live = [self.live[config.digest] for config in self.kept]
            tuner.check_disk_cache(triton_key, live, not_cached)
        except _NotCached:
            return None
        digest = as_config(tuner.cache.pop(triton_key)).digest
        return digest if digest in self.live else None


def _with_text(value: object) -> object:
    """Values of other libraries, such as Triton's dtypes, count by how they print."""
    try:
        codec.encode(value)
    except TypeError:
        return repr(value)
    return value


def _check_names(name: str, tuner: Any) -> None:
    """Refuse unknown names of buffers, whose values would be wrong after a tuning. Warn of unknown
    key names: Triton before 3.9 drops them silently and uses one config for all values."""
    for option in ("reset_to_zero", "restore_value"):
        for buffer in getattr(tuner, option):
            if buffer not in tuner.arg_names:
                expected = f"arguments of the kernel: {', '.join(tuner.arg_names)}"
                raise InvalidArgument(name, option, buffer, expected)
    unknown = [key for key in tuner.keys if key not in tuner.arg_names]
    if unknown:
        warn(
            f"{name}: key names {', '.join(map(repr, unknown))} are no arguments of the kernel, so "
            f"they tell no launches apart. Its arguments are {', '.join(tuner.arg_names)}.",
            TuningWarning,
        )
