"""Tune one ``triton.autotune`` kernel for one key inside ``contextual_autotune``.

The ranks agree on a record or on the candidates. Each call of the decorated function then takes one
*step* of the plan: it launches one candidate once, untimed or timed. When the plan ends, the winner
is chosen.
"""

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
    LocalRecord,
    Proposal,
    RecordSummary,
    find_remote_record,
    local_record,
)
from triton_dist._tuning.engine.channel import Channel, Step, timestamp
from triton_dist._tuning.engine.compile_ahead import CompileAhead
from triton_dist._tuning.engine.components import CommonComponents
from triton_dist._tuning.engine.contextual.launch import has_own_cache
from triton_dist._tuning.engine.progress import candidates_id, journal_header
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.protocols import Journal
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Failure,
    Fingerprint,
    JournalEntry,
    Key,
    LaunchStep,
    Measurement,
    Outcome,
    Trial,
    TuningRecord,
    codec,
    numbered,
    validity,
)
from triton_dist._tuning.values.outcome import Reduction
from triton_dist._tuning.values.show import error_text
from triton_dist._warn import warn
from triton_dist.errors import (
    InvalidArgument,
    NoValidConfig,
    RankTimeout,
    TuningFrozen,
    TuningWarning,
)


class Plan(Protocol):
    """The sequence of launches of one kernel and key.

    A plan is deterministic: equal times lead to equal steps on all ranks.
    """

    samples: dict[str, list[float]]
    """Milliseconds of the timed launches, by digest of each config that has not failed."""

    @property
    def current(self) -> LaunchStep | None:
        """The next launch, or ``None`` at the end."""

    def tell(self, milliseconds: float) -> None: ...
    def fail(self, digest: str) -> None: ...


class Log(Protocol):
    def line(self, text: str) -> None:
        """Append a line to this rank's file."""

    def report(self, text: str) -> None:
        """Append a line, and print it on rank 0 (the leader) if the tuning is verbose."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ContextualComponents(CommonComponents):
    """The components of one tuning by ``contextual_autotune``.

    The time limit of a call of the function is ``settings.step_seconds``, or three times the
    duration of the call before if this is longer. The limit of the first call, which may compile
    other code, is ``settings.compile_seconds``.
    """

    fingerprint: Callable[[Any, ConfigSpace], Fingerprint]
    """Returns everything that a record of a kernel with these configs depends on."""
    plan: Callable[[Sequence[Config], int, int], Plan]
    """Returns the plan for the candidates and the numbers of untimed and timed launches of each."""
    log: Log
    no_grad: Callable[[], AbstractContextManager[object]]


_ADDRESS = " at 0x"
"""Part of a default ``repr``. A key with this text differs between processes."""


def triton_key(autotuner: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return Triton's key of a launch: values of the arguments in ``key=``, then dtypes of all
    arguments."""
    by_name = dict(zip(autotuner.arg_names, args, strict=False)) | kwargs
    arguments = {name: value for name, value in by_name.items() if name in autotuner.arg_names}
    values = [arguments[name] for name in autotuner.keys if name in arguments]
    return (*values, *(str(arg.dtype) for arg in arguments.values() if hasattr(arg, "dtype")))


def kernel_name(autotuner: Any) -> str:
    return f"{autotuner.base_fn.__module__}.{autotuner.base_fn.__qualname__}"


def jit_function(autotuner: Any) -> Any:
    """Return the ``JITFunction`` inside ``autotuner``; ``None`` if the kernel is interpreted."""
    fn = autotuner.fn
    while not isinstance(fn, JITFunction) and hasattr(fn, "fn"):
        fn = fn.fn
    return fn if isinstance(fn, JITFunction) else None


def options_text(config: Any) -> str:
    """Return the options that a ``triton.Config`` sets, as text."""
    return ", ".join(f"{name}: {value}" for name, value in config.all_kwargs().items())


class KernelTuning:
    """The tuning of one kernel for one key.

    Attributes:
        triton_configs: the ``triton.Config`` objects of this process, by digest.
        winner: the config to use; ``None`` until it is chosen.
        was_tuned: whether the winner was tuned in this process, and not read from a record.
        recorded_winner_text: the winner and the location of its record; empty unless the winner was
            read from a record.
    """

    def __init__(
        self, autotuner: Any, triton_key: tuple[Any, ...], key: Key, triton_configs: dict[str, Any]
    ) -> None:
        self.autotuner, self.triton_key, self.key = autotuner, triton_key, key
        self.triton_configs = triton_configs
        self.name = f"{kernel_name(autotuner)} key {key}"
        self.winner: Any = None
        self.was_tuned = False
        self.recorded_winner_text = ""
        self.is_untuned_default = False
        """The winner is the first config, for one call only, because nothing could be tuned."""
        self.compiled: set[str] = set()
        self.compile_ahead: CompileAhead | None = None
        self._has_own_cache = has_own_cache(autotuner)
        self.failures: dict[str, Failure] = {}
        self.launches: Counter[str] = Counter()
        """Number of steps of each config so far, by digest."""
        self.record: TuningRecord | None = None
        # Set after the first message, if there is no record.
        self.fingerprint: Fingerprint
        self.plan: Plan
        self.warmup = 0
        self.candidates: Sequence[Config] = ()
        self.pruned: Sequence[tuple[Config, str]] = ()
        self._journal: Journal | None = None
        self._header: codec.Tree = {}
        self._num_entries = 0
        self._tried_digest = ""
        """Digest of the config that was written to the journal last as being tried."""
        self._start_seconds = time.monotonic()

    @property
    def can_persist(self) -> bool:
        """True if another process would have an equal key, so that a record is useful."""
        return _ADDRESS not in self.key.text

    def set_winner(self, winner: Any) -> None:
        """Set ``winner`` for launches inside and outside of the decorated function."""
        self.winner = winner
        self.write_to_triton_cache()

    def write_to_triton_cache(self) -> None:
        """Write the winner to the kernel's own cache in memory."""
        if not self.is_untuned_default and not self._has_own_cache:
            self.autotuner.cache[self.triton_key] = self.winner

    def remove_from_triton_cache(self) -> None:
        """Remove the winner from the kernel's own cache, so that launches outside of the function
        choose their config again."""
        if not self._has_own_cache:
            self.autotuner.cache.pop(self.triton_key, None)

    def resume(
        self,
        record: TuningRecord | None,
        components: ContextualComponents,
        channel: ContextualChannel,
        call: int,
    ) -> None:
        """Continue an interrupted tuning from the journal, equally on all ranks.

        Quarantined configs are dropped. ``record`` is the record of this rank that the tuning
        replaces, if any. ``call`` is the number of the function's call.
        """
        header = journal_header(self.key, self.fingerprint, candidates_id(self.candidates))
        journal = components.journal(self.key)
        quarantined, entries = dict(journal.quarantined(header)), list[JournalEntry]()
        if components.ranks.is_leader:
            entries = list(journal.begin(header, None if record is None else record.digest))
        by_rank = channel.all_gather(
            Step(f"call {call}: journal of {self.name}"), (quarantined, entries)
        )
        for entry in next((entries for _, entries in by_rank if entries), []):
            # The journal has no untimed steps. Take them again, up to the next timed step.
            while (step := self.plan.current) is not None and not step.is_timed:
                if step.config.digest != entry.config_digest:
                    break
                self._advance(entry.config_digest, 0.0)
            if isinstance(entry.outcome, Failure):
                self.failures[entry.config_digest] = entry.outcome
                self.plan.fail(entry.config_digest)
            elif step is not None and step.config.digest == entry.config_digest:
                self._advance(entry.config_digest, entry.outcome.samples[0])
            else:  # the interrupted tuning took another step
                break
            self._num_entries += 1
        self._journal, self._header = journal, header
        for failures, _ in reversed(by_rank):
            for digest, failure in failures.items():
                self.fail(digest, failure)

    def trying(self, digest: str) -> None:
        """Write to the journal that the config will run and may crash this process."""
        if self._journal is not None and not self.launches[digest]:
            self._journal.trying(digest)
            self._tried_digest = digest

    def _advance(self, digest: str, milliseconds: float) -> None:
        self.launches[digest] += 1
        self.plan.tell(milliseconds)

    def record_time(self, digest: str, milliseconds: float, reduction: Reduction) -> None:
        """Record the time of the plan's current step, which all ranks have taken."""
        is_timed = self.plan.current is not None and self.plan.current.is_timed
        self._advance(digest, milliseconds)
        if is_timed:
            self._append(digest, Measurement((milliseconds,), 0, reduction))

    def fail(self, digest: str, failure: Failure) -> None:
        """Drop a config that failed on some rank. It need not be the config of the current step."""
        if digest in self.failures:
            return
        self.failures[digest] = failure
        self.plan.fail(digest)
        self._append(digest, failure)

    def _append(self, digest: str, outcome: Outcome) -> None:
        if self._journal is not None:
            seconds = time.monotonic() - self._start_seconds
            self._journal.append(JournalEntry(self._num_entries, digest, 1, outcome, seconds))
            self._num_entries += 1

    def quarantine(self, config: Config, failure: Failure) -> None:
        """Exclude ``config`` at the next start. Any thread may call this method."""
        if self._journal is not None:
            self._journal.quarantine(self._header, config.digest, failure)

    def close(self, error: BaseException | None) -> None:
        """End the tuning. Without an ``error``, also remove the journal."""
        if self.compile_ahead is not None:
            self.compile_ahead.close()
        journal, self._journal = self._journal, None
        if journal is None:
            return
        if error is None:
            journal.remove()
        elif self._tried_digest and not isinstance(error, RankTimeout):
            journal.ended_by_exception(self._tried_digest)
        journal.close()

    def fallbacks(self, digest: str) -> Iterator[Config]:
        """Yield configs to launch if ``digest`` fails: the fastest first, then those without a
        time."""
        dropped = {digest, *self.failures}
        others = [config for config in self.candidates if config.digest not in dropped]
        samples = self.plan.samples
        yield from sorted(others, key=lambda c: min(samples[c.digest], default=float("inf")))

    def finish(self, reduction: Reduction) -> TuningRecord:
        """Set the winner, and return the record. Raise ``NoValidConfig`` if every config failed."""
        trials = [Trial.of(c, self._outcome(c.digest, reduction)) for c in self.candidates]
        trials += [Trial.of(c, Failure("pruned", reason)) for c, reason in self.pruned]
        seconds = time.monotonic() - self._start_seconds
        self.record = TuningRecord(self.key, self.fingerprint, tuple(trials), timestamp(), seconds)
        self.set_winner(self.triton_configs[self.record.best.digest])
        self.was_tuned = True
        if self._journal is not None:
            self._journal.finish(self.record.digest)
        return self.record

    def _outcome(self, digest: str, reduction: Reduction) -> Outcome:
        failure = self.failures.get(digest)
        if failure is not None:
            return failure
        return Measurement(tuple(self.plan.samples[digest]), self.warmup, reduction)

    def publish(self) -> None:
        """Store and report the result like Triton's own tuning.

        Write the times to attributes of the kernel and the winner to Triton's disk cache. Call
        Triton's listener, and print if ``TRITON_PRINT_AUTOTUNING`` is set.
        """
        autotuner, record = self.autotuner, self.record
        if record is None:
            return
        # Triton stores three quantiles (0.5, 0.2 and 0.8). Store the median for each.
        timings = {
            self.triton_configs[trial.digest]: [trial.outcome.median] * 3
            for trial in record.trials
            if isinstance(trial.outcome, Measurement)
        }
        autotuner.bench_time, autotuner.configs_timings = record.seconds, timings
        if autotuner.cache_results and not self._has_own_cache:
            configs = [self.triton_configs[config.digest] for config in self.candidates]
            autotuner.check_disk_cache(self.triton_key, configs, lambda: None)
            # ``check_disk_cache`` may have loaded an older entry.
            autotuner.configs_timings = timings
            self.write_to_triton_cache()
        listener = getattr(triton.knobs.autotuning, "listener", None)
        if listener is not None:  # Triton 3.8 and later
            listener(
                fn=jit_function(autotuner) or autotuner.fn,
                key=self.triton_key,
                best_config=self.winner,
                configs_timings=autotuner.configs_timings,
                duration=record.seconds,
                cache_hit=False,
            )
        if triton.knobs.autotuning.print:
            print(
                f"Triton autotuning for function {autotuner.base_fn.__name__},\n"
                f"with key as {self.triton_key},\nfinished after {record.seconds:.2f}s,\n"
                f"best config selected: {self.winner};",
                flush=True,
            )


T = TypeVar("T")
UnfinishedConfig: TypeAlias = Callable[[], tuple[KernelTuning, Config] | None]
"""Function that returns the kernel and config that run or compile now, if any."""


class ContextualChannel(Channel):
    """Messages between ranks during one tuning by ``contextual_autotune``.

    Every message is an ``all_gather``. If ranks are at different points of the function, they raise
    an error with the point of each rank.

    Attributes:
        limit_seconds: time limit for the current call of the function.
    """

    def __init__(
        self, components: ContextualComponents, function: str, unfinished_config: UnfinishedConfig
    ) -> None:
        with watchdog.paused(), components.tuning_lock():
            super().__init__(
                components.ranks,
                function,
                components.settings.step_seconds,
                components.settings.grace_seconds,
            )
        self._unfinished_config, self.limit_seconds = (
            unfinished_config,
            components.settings.compile_seconds,
        )

    def all_gather(self, step: Step, value: T, user_seconds: float = 0.0) -> list[T]:
        """Return the values of all ranks. User code before this message may take ``user_seconds``,
        by default ``limit_seconds``."""
        with watchdog.paused():  # pause the time limit of the function's call
            step = replace(step, phase=f"{self._function}, {step.phase}")
            if not self.all_have_joined:
                return self.first_all_gather(step, value)
            return super().all_gather(step, value, user_seconds or self.limit_seconds)

    def blamed_config(self, step: Step) -> Config | None:
        unfinished = self._unfinished_config()
        return None if unfinished is None else unfinished[1]

    def quarantine(self, config: Config, failure: Failure) -> None:
        unfinished = self._unfinished_config()
        if unfinished is not None:
            unfinished[0].quarantine(config, failure)


def as_config(config: Any) -> Config:
    """Return a ``triton.Config`` as a config of the tuner.

    If its ``pre_hook`` has no stable text, it is replaced by its name. So is a
    ``functools.partial``, because its arguments may differ between ranks.
    """
    if isinstance(config.pre_hook, functools.partial) or not codec.is_encodable(
        config.pre_hook, False
    ):
        without_hook = copy.copy(config)
        without_hook.pre_hook = None
        hook = getattr(config.pre_hook, "__qualname__", type(config.pre_hook).__qualname__)
        return Config({"config": without_hook, "pre_hook": hook})
    return Config({"config": config})


def begin_kernel_tuning(
    autotuner: Any,
    triton_key: tuple[Any, ...],
    prune: Callable[[], list[Any]],
    components: ContextualComponents,
    channel: ContextualChannel,
    call: int,
) -> KernelTuning:
    """Create the tuning of a kernel and key. All ranks must call this function together.

    If there is a record, the returned ``KernelTuning`` has its winner.

    Args:
        prune: returns the ``triton.Config`` objects that the kernel's own pruning keeps.
        call: number of the function's call, for messages.

    Raises:
        RankDisagreement: kernels, keys, configs or sources differ; raised on every rank.
        RankTimeout: another rank did not launch the kernel.
        InvalidArgument: ``reset_to_zero`` or ``restore_value`` has a name that is not an argument
            of the kernel.
        NoValidConfig: the pruning on rank 0 keeps no config.
    """
    name = kernel_name(autotuner)
    _check_names(name, autotuner)
    local = _LocalConfigs(autotuner, prune)
    values = (value if codec.is_encodable(value) else repr(value) for value in triton_key)
    key = Key.of(name, tuple(values), components.hardware)
    fingerprint = components.fingerprint(autotuner, local.space)
    tuning = KernelTuning(autotuner, triton_key, key, local.triton_configs)
    found = LocalRecord(None, "its key has no text that is stable across processes")
    strict, configs = components.settings.strict_versions, ConfigSpace(local.configs.values())
    if tuning.can_persist:
        stored = components.store.find(key.with_signature_of(fingerprint))
        found = local_record(stored, lambda record: validity(record, fingerprint, configs, strict))
    record_summary = found.record_summary
    if found.record is None:
        record_summary = RecordSummary(local.winner_on_disk(triton_key))
    compared_texts = [
        (
            f"the pruning of {tuning.name}",
            "done" if local.failure is None else error_text(local.failure),
        ),
        (
            f"the configs of {tuning.name}",
            f"{len(local.space)} configs, digest {local.space.digest}",
        ),
    ]
    remote = components.remote if tuning.can_persist else None
    proposal = Proposal(
        compared_texts,
        fingerprint,
        record_summary,
        always_tune=components.settings.always_tune,
        frozen=components.settings.frozen,
        cannot_measure=components.device.is_capturing(),
        kept_digests=[config.digest for config in local.kept],
        # No wait for other jobs, because several kernels are tuned at the same time.
        max_remote_lookup_seconds=remote.max_find_seconds(may_wait=False) if remote else None,
    )
    proposals = channel.all_gather(Step(f"call {call}: launch of {tuning.name}"), proposal)
    # All ranks raise here, because ``compared_texts`` has the failures of all ranks.
    if local.failure is not None:
        raise channel.record_final_error(local.take_failure())
    agreement = Agreement(channel, tuning.name, proposals)
    tuning.key = key.with_signature_of(agreement.fingerprint)
    winner, location = agreement.winner_digest, found.location_or_reason
    if winner is None and len(agreement.leader_proposal.kept_digests) > 1:
        shared = find_remote_record(
            components, channel, agreement, tuning.key,
            lambda record: validity(record, agreement.fingerprint, configs, strict),
        )  # fmt: skip
        if shared is not None:
            winner, location = shared.record.best.digest, shared.location
    if winner is not None:
        tuning.set_winner(local.triton_configs[winner])
        tuning.recorded_winner_text = (
            f"config {options_text(tuning.winner)} of the tuning record {location}"
        )
        components.log.report(f"{tuning.name}: known, {options_text(tuning.winner)}")
        return tuning
    leader, policy = agreement.leader_proposal, components.settings.policy
    kept = [local.configs[digest] for digest in leader.kept_digests if digest in local.configs]
    if len(kept) < len(leader.kept_digests):
        raise LookupError(
            f"{tuning.name}: the leader's pruning returned configs that this rank does not have"
        )
    pruned = [
        (c, "pruned by the kernel") for c in local.space if c.digest not in leader.kept_digests
    ]
    if not kept:
        causes = {str(config): reason for config, reason in pruned}
        raise channel.record_final_error(NoValidConfig(tuning.name, tuning.key, causes))
    # A single config needs no tuning, so it is used even if tuning is forbidden.
    if agreement.frozen_ranks and len(kept) > 1:
        key, reason = tuning.key, found.location_or_reason
        raise channel.record_final_error(
            TuningFrozen(key.full_name, key, key.hardware, reason, agreement.frozen_ranks)
        )
    if agreement.cannot_measure:
        tuning.winner, tuning.is_untuned_default = local.triton_configs[kept[0].digest], True
        warn(
            f"{tuning.name}: not tuned yet, and tuning is impossible during CUDA-graph capture. "
            "Its first config is used. Call the function once before the capture.",
            TuningWarning,
        )
        return tuning
    tuning.candidates, tuning.pruned, tuning.fingerprint = kept, pruned, agreement.fingerprint
    tuning.plan = components.plan(kept, policy.warmup, policy.repeat)
    tuning.warmup = policy.warmup
    if len(kept) == 1:
        tuning.set_winner(local.triton_configs[kept[0].digest])  # there is no choice
    elif tuning.can_persist:
        tuning.resume(found.record, components, channel, call)
    reason = found.location_or_reason
    if leader.always_tune:
        reason = "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE is set"
    ranks = components.ranks.size
    components.log.report(
        f"{tuning.name}: {reason}; tuning {len(kept)} configs ({len(pruned)} pruned) on "
        f"{ranks} rank{'' if ranks == 1 else 's'}"
    )
    return tuning


class _NotCached(Exception):
    pass


class _LocalConfigs:
    """The configs of the kernel on this rank, and the result of the pruning on this rank.

    The pruning keeps ``kept``. ``configs`` and ``triton_configs`` have all configs, by digest.
    """

    def __init__(self, autotuner: Any, prune: Callable[[], list[Any]]) -> None:
        self._autotuner = autotuner
        self.failure: Exception | None = None
        pruned: list[Any] = []
        try:
            pruned = prune()
        except Exception as error:
            self.failure = error
        configs = numbered(map(as_config, autotuner.configs))
        pairs = list(zip(configs, autotuner.configs, strict=True))
        by_id = {id(original): config for config, original in pairs}
        self.space = ConfigSpace(configs)
        kept = [(by_id.get(id(each)) or as_config(each), each) for each in pruned]
        self.triton_configs = {config.digest: original for config, original in [*kept, *pairs]}
        self.configs = {config.digest: config for config, _ in [*kept, *pairs]}
        self.kept = list({config.digest: config for config, _ in kept}.values())

    def take_failure(self) -> Exception:
        """Return the failure, and drop it, because its frames refer to this object."""
        failure, self.failure = self.failure, None
        assert failure is not None
        return failure

    def winner_on_disk(self, triton_key: tuple[Any, ...]) -> str | None:
        """Return the digest of the winner in Triton's disk cache, or ``None``."""
        autotuner = self._autotuner
        if not autotuner.cache_results or has_own_cache(autotuner):
            return None

        def not_cached() -> None:
            raise _NotCached

        try:
            configs = [self.triton_configs[config.digest] for config in self.kept]
            autotuner.check_disk_cache(triton_key, configs, not_cached)
        except _NotCached:
            return None
        digest = as_config(autotuner.cache.pop(triton_key)).digest
        return digest if digest in self.triton_configs else None


def _check_names(name: str, autotuner: Any) -> None:
    """Check the argument names in the options of ``triton.autotune``.

    Raise for an unknown name in ``reset_to_zero`` or ``restore_value``, because a tuning would
    corrupt the buffer. Warn about unknown names in ``key``: Triton before 3.9 ignores them and uses
    one config for all values.
    """
    for option in ("reset_to_zero", "restore_value"):
        for buffer in getattr(autotuner, option):
            if buffer not in autotuner.arg_names:
                expected = f"arguments of the kernel: {', '.join(autotuner.arg_names)}"
                raise InvalidArgument(name, option, buffer, expected)
    unknown = [key for key in autotuner.keys if key not in autotuner.arg_names]
    if unknown:
        warn(
            f"{name}: key names {', '.join(map(repr, unknown))} are not arguments of the kernel, "
            "so they do not distinguish launches. The arguments are "
            f"{', '.join(autotuner.arg_names)}.",
            TuningWarning,
        )
