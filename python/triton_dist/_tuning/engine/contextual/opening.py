"""Opening a context: a kernel comes with a key that the function has not had yet.

Each rank says what it came with; all see whether that is the same, whose record is used, and which
candidates the leader has.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from triton_dist._tuning.engine.agreement import (
    Arrival,
    Meeting,
    OwnRecord,
    Verdict,
    own_record,
)
from triton_dist._tuning.engine.contextual.context import (
    Context,
    kernel_name,
    shown,
    triton_disk_winner,
)
from triton_dist._tuning.engine.contextual.messages import Messages
from triton_dist._tuning.engine.contextual.parts import ContextualParts
from triton_dist._tuning.engine.conversation import Situation
from triton_dist._tuning.engine.progress import head_of, journal_head
from triton_dist._tuning.values import (
    Config,
    ConfigSpace,
    Entry,
    Fingerprint,
    Key,
    TuningRecord,
    codec,
    told_apart,
    validity,
)
from triton_dist._warn import warn
from triton_dist.errors import InvalidArgument, NoValidConfig, TuningFrozen, TuningWarning


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
    kept = [config.digest for config in own.kept]
    arrival = Arrival.of(parts, compared, fingerprint, verdict, kept)
    arrivals = messages.gather(Situation(f"call {call}: launch of {context.name}"), arrival)
    if own.failure is not None:
        raise messages.lose(own.take_failure())
    meeting = Meeting(messages, context.name, arrivals)
    context.key = key.under(meeting.fingerprint)
    return _begun(context, own, meeting, found, parts, messages, call)


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
        """Digest of the winner in the kernel's own ``cache_results``."""
        kept = [self.live[config.digest] for config in self.kept]
        winner = triton_disk_winner(self._tuner, triton_key, kept)
        digest = None if winner is None else as_config(winner).digest
        return digest if digest in self.live else None


def _begun(
    context: Context,
    own: _Own,
    meeting: Meeting,
    found: OwnRecord,
    parts: ContextualParts,
    messages: Messages,
    call: int,
) -> Context:
    if meeting.winner is not None:
        context.use(own.live[meeting.winner])
        context.recorded = f"config {shown(context.winner)} of the tuning record {found.where}"
        parts.log.say(f"{context.name}: known, {shown(context.winner)}")
        return context
    leader, fingerprint, policy = meeting.leader, meeting.fingerprint, parts.settings.policy
    kept = [own.configs[digest] for digest in leader.kept if digest in own.configs]
    if len(kept) < len(leader.kept):
        raise LookupError(f"{context.name}: the leader's pruning made configs that this rank lacks")
    pruned = [(c, "pruned by the kernel") for c in own.space if c.digest not in leader.kept]
    if not kept:
        causes = {str(config): reason for config, reason in pruned}
        raise messages.lose(NoValidConfig(context.name, context.key, causes))
    if meeting.frozen and len(kept) > 1:
        key, frozen = context.key, meeting.frozen
        raise messages.lose(TuningFrozen(key.full_name, key, key.hardware, found.where, frozen))
    if meeting.capturing:
        context.use_once(own.live[kept[0].digest])
        warn(
            f"{context.name}: not tuned yet, and cannot be during CUDA-graph capture; its first "
            "config is used. Call the function once before.",
            TuningWarning,
        )
        return context
    plan = parts.plan(kept, policy.warmup, policy.repeat)
    context.begin(kept, pruned, fingerprint, plan, policy.warmup)
    if len(kept) == 1:
        context.use(own.live[kept[0].digest])  # nothing to choose from
    elif context.can_persist:
        _resume(context, fingerprint, found.record, parts, messages, call)
    reason = "told to tune always" if leader.always_tune else found.where
    ranks = parts.ranks.size
    parts.log.say(
        f"{context.name}: {reason}; tuning {len(kept)} configs ({len(pruned)} pruned) on "
        f"{ranks} rank{'' if ranks == 1 else 's'}"
    )
    return context


def _resume(
    context: Context,
    fingerprint: Fingerprint,
    record: TuningRecord | None,
    parts: ContextualParts,
    messages: Messages,
    call: int,
) -> None:
    """Go on where an interrupted tuning of the same was, without the configs that some rank got
    stuck in. Ranks on other hosts may have cache folders of their own."""
    head = journal_head(context.key, fingerprint, head_of(context.candidates))
    journal = parts.journal(context.key)
    stuck, entries = dict(journal.quarantined(head)), list[Entry]()
    if parts.ranks.is_leader:
        entries = list(journal.begin(head, None if record is None else record.digest))
    told = messages.gather(Situation(f"call {call}: journal of {context.name}"), (stuck, entries))
    context.resume(next((leaders for _, leaders in told if leaders), []))
    context.keep(journal, head)
    for quarantined, _ in reversed(told):  # the lowest rank's counts
        for digest, failure in quarantined.items():
            context.fail(digest, failure)


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
