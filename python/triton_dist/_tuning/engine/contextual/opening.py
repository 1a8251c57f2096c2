"""How the ranks open a context: a kernel comes with a key that the function has not had yet.

Each rank says what it came with; all see whether that is the same, whose record is used, and which
candidates the leader has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.engine.agreement import same_fingerprint
from triton_dist._tuning.engine.contextual.context import (
    Context,
    kernel_name,
    shown,
    triton_disk_winner,
)
from triton_dist._tuning.engine.contextual.parts import ContextualParts
from triton_dist._tuning.engine.contextual.words import Words
from triton_dist._tuning.engine.conversation import Situation
from triton_dist._tuning.values import Config, ConfigSpace, Entry, Fingerprint, TuningRecord, codec
from triton_dist._warn import warn
from triton_dist.errors import NoValidConfig, RankDisagreement, TuningFrozen, TuningWarning


@dataclass(frozen=True)
class Opening:
    """What one rank came with. Configs are digests."""

    space: str
    fingerprint: Fingerprint
    kept: tuple[str, ...] = ()
    """What its pruning leaves, in order; the leader's counts."""
    failure: str | None = None
    """The exception that its pruning raised."""
    winner: str | None = None
    """Of a valid record that it has."""
    bound: frozenset[str] | None = None
    """The bound constants that this record counts; ``None``: there is none."""
    is_leader: bool = False
    always_tune: bool = False
    frozen: bool = False
    capturing: bool = False


def as_config(config: Any) -> Config:
    """A ``triton.Config`` as the tuner's; a hook that has no stable text counts by its name."""
    try:
        codec.encode(config.pre_hook)
    except TypeError:
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
    words: Words,
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
        NoValidConfig: the leader's pruning leaves nothing.
    """
    name = kernel_name(tuner)
    _warn_of_unknown_keys(name, tuner)
    own = _Own(tuner, prune)
    key = parts.kernels.key(name, triton_key)
    fingerprint = parts.kernels.fingerprint(tuner, own.space)
    context = Context(tuner, triton_key, key, own.live)
    record, where = None, "its key has no text that another process would understand"
    if context.can_persist:
        record, where = parts.kernels.find(key, fingerprint, own.configs.values())
    found = own.winner_on_disk(triton_key) if record is None else record.best.digest
    openings = words.gather(
        Situation(f"call {call}: launch of {context.name}"),
        Opening(
            f"{len(own.space)} configs, digest {own.space.digest}",
            fingerprint,
            tuple(config.digest for config in own.kept),
            None if own.failure is None else f"{type(own.failure).__name__}: {own.failure}",
            found if found in own.live else None,
            None if record is None else frozenset(record.fingerprint.bound),
            parts.ranks.is_leader,
            parts.always_tune,
            parts.frozen,
            parts.device.is_capturing(),
        ),
    )
    if own.failure is not None:
        raise words.lose(own.failure)
    common = _same(context.name, openings, words)
    context.key = key.binding(common.bound)
    return _begun(context, own, openings, common, record, where, parts, words, call)


class _Own:
    """What this rank has: its configs, and what its pruning makes of them."""

    def __init__(self, tuner: Any, prune: Callable[[], list[Any]]) -> None:
        self._tuner = tuner
        self.failure: Exception | None = None
        pruned: list[Any] = []
        try:
            pruned = prune()
        except Exception as error:
            self.failure = error
        pairs = [(as_config(config), config) for config in tuner.configs]
        self.space = ConfigSpace([dict(config) for config, _ in pairs])
        kept = [(as_config(config), config) for config in pruned]
        self.live = {config.digest: live for config, live in [*kept, *pairs]}
        self.configs = {config.digest: config for config, _ in [*kept, *pairs]}
        self.kept = list({config.digest: config for config, _ in kept}.values())

    def winner_on_disk(self, triton_key: tuple[Any, ...]) -> str | None:
        """Of the kernel's own ``cache_results``."""
        kept = [self.live[config.digest] for config in self.kept]
        winner = triton_disk_winner(self._tuner, triton_key, kept)
        return None if winner is None else as_config(winner).digest


def _same(name: str, openings: Sequence[Opening], words: Words) -> Fingerprint:
    """What all ranks depend on."""
    failures = {words.named(r): each.failure or "done" for r, each in enumerate(openings)}
    if any(each.failure for each in openings):
        raise words.lose(RankDisagreement(f"the pruning of {name}", failures))
    spaces = {words.named(rank): each.space for rank, each in enumerate(openings)}
    if len(set(spaces.values())) > 1:
        raise words.lose(RankDisagreement(f"the configs of {name}", spaces))
    try:
        return same_fingerprint(words, name, [each.fingerprint for each in openings])
    except RankDisagreement as error:
        raise words.lose(error) from None


def _begun(
    context: Context,
    own: _Own,
    openings: Sequence[Opening],
    fingerprint: Fingerprint,
    record: TuningRecord | None,
    where: str,
    parts: ContextualParts,
    words: Words,
    call: int,
) -> Context:
    leader = next(each for each in openings if each.is_leader)
    capturing = any(each.capturing for each in openings)
    frozen = [words.named(rank) for rank, each in enumerate(openings) if each.frozen]
    # Where nothing can be tuned, a record is used even if it was asked to be replaced.
    usable = [leader, *openings] if capturing or frozen or not leader.always_tune else []
    counted = frozenset(fingerprint.bound)
    known = (each.winner for each in usable if each.bound in (None, counted))
    winner = next((each for each in known if each is not None), None)
    if winner is not None:
        context.use(own.live[winner])
        parts.log.say(f"{context.name}: known, {shown(context.winner)}")
        return context
    kept = [own.configs[digest] for digest in leader.kept if digest in own.configs]
    if len(kept) < len(leader.kept):
        raise LookupError(f"{context.name}: the leader's pruning made configs that this rank lacks")
    pruned = [(c, "pruned by the kernel") for c in own.space if c.digest not in leader.kept]
    if not kept:
        causes = {str(config): reason for config, reason in pruned}
        raise words.lose(NoValidConfig(context.name, context.key, causes))
    if frozen and len(kept) > 1:
        key = context.key
        raise words.lose(TuningFrozen(key.full_name, key, key.hardware, where, frozen))
    if capturing:
        context.use_once(own.live[kept[0].digest])
        warn(
            f"{context.name}: not tuned yet, and cannot be during CUDA-graph capture; its first "
            "config is used. Call the function once before.",
            TuningWarning,
        )
        return context
    plan = parts.plan(kept, parts.warmup, parts.repeat)
    context.begin(kept, pruned, fingerprint, plan, parts.warmup)
    if len(kept) == 1:
        context.use(own.live[kept[0].digest])  # nothing to choose from
    elif context.can_persist:
        _resume(context, fingerprint, record, parts, words, call)
    reason = "told to tune always" if leader.always_tune else where
    parts.log.say(
        f"{context.name}: {reason}; tuning {len(kept)} configs ({len(pruned)} pruned) on "
        f"{len(openings)} rank{'' if len(openings) == 1 else 's'}"
    )
    return context


def _resume(
    context: Context,
    fingerprint: Fingerprint,
    record: TuningRecord | None,
    parts: ContextualParts,
    words: Words,
    call: int,
) -> None:
    """Go on where an interrupted tuning of the same was, without the configs that some rank got
    stuck in. Ranks on other hosts may have cache folders of their own."""
    head: codec.Tree = {
        "function": context.key.function,
        "key": context.key.text,
        "hardware_group": context.key.hardware,
        "fingerprint": codec.digest(vars(fingerprint)),
        "candidates": [config.digest for config in context.candidates],
    }
    journal = parts.kernels.journal(context.key)
    stuck, entries = dict(journal.quarantined(head)), list[Entry]()
    if parts.ranks.is_leader:
        entries = list(journal.begin(head, None if record is None else record.digest))
    told = words.gather(Situation(f"call {call}: journal of {context.name}"), (stuck, entries))
    context.resume(next((leaders for _, leaders in told if leaders), []))
    context.keep(journal, head)
    for quarantined, _ in reversed(told):  # the lowest rank's counts
        for digest, failure in quarantined.items():
            context.fail(digest, failure)


def _warn_of_unknown_keys(name: str, tuner: Any) -> None:
    """Triton before 3.9 drops them without a word: one config for all values."""
    unknown = [key for key in tuner.keys if key not in tuner.arg_names]
    if unknown:
        warn(
            f"{name}: key names {', '.join(map(repr, unknown))} are no arguments of the kernel, so "
            f"they tell no launches apart. Its arguments are {', '.join(tuner.arg_names)}.",
            TuningWarning,
        )
