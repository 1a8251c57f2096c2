"""Compare the first calls of a key on all ranks, and select the record to use.

``tune.autotune`` and ``contextual_autotune`` begin with one exchange of :class:`Proposal`. If every
rank has a valid record, ``contextual_autotune`` sends no other message. ``tune.autotune`` sends one
more: whether the recorded winner still works. Later calls send no message.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.parts import CommonParts
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.values import (
    Fingerprint,
    Key,
    StoredRecord,
    TuningRecord,
    Validity,
    with_common_constants,
)
from triton_dist.errors import RankDisagreement


@dataclass(frozen=True)
class Verdict:
    """Result of a rank's look-up in its own cache."""

    winner: str | None = None
    """Digest of the winning config, if the rank has a valid record."""
    record: str | None = None
    """Digest of the record."""
    shipped: bool = False
    """The record was shipped with a package. A rank's own record is preferred to it."""
    bound: frozenset[str] | None = None
    """The bound constants that the record depends on. ``None``: the record ignores them."""


class LocalRecord(NamedTuple):
    """This rank's valid record and its location, or ``None`` and the reason."""

    record: TuningRecord | None
    location_or_reason: str
    tolerated: str = ""
    """Accepted differences between the record and this process."""

    @property
    def verdict(self) -> Verdict:
        record = self.record
        if record is None:
            return Verdict()
        bound_names = None if record.shipped else frozenset(record.fingerprint.bound)
        return Verdict(record.best.digest, record.digest, record.shipped, bound_names)


def local_record(
    stored: Iterable[StoredRecord], validator: Callable[[TuningRecord], Validity]
) -> LocalRecord:
    """Return the first of the ``stored`` records that ``validator`` accepts."""
    reason = ""
    for record, location in stored:
        found = validator(record)
        if not found.reasons:
            return LocalRecord(record, location, "; ".join(found.tolerated))
        # Report the first reason only: the first record belongs to this function.
        kind = "shipped record" if record.shipped else "record"
        reason = reason or f"the {kind} in {location} is not valid: {'; '.join(found.reasons)}"
    return LocalRecord(None, reason or "no record")


@dataclass(frozen=True)
class Proposal:
    """The first message of one rank."""

    compared: Sequence[tuple[str, str]]
    """Pairs of a name and a text that must be equal on all ranks, in the order of comparison."""
    fingerprint: Fingerprint
    verdict: Verdict
    always_tune: bool
    frozen: bool
    capturing: bool
    """Nothing can be measured now, because of a capture or a trace."""
    kept: Sequence[str] = ()
    """Digests of the configs that pruning keeps, if pruning has already run. The leader's
    list is used."""
    will_run: bool = False
    """The rank runs the function with the chosen config immediately."""
    remote_seconds: float | None = None
    """Maximum duration of a look-up in the remote store. ``None``: this rank makes no look-up."""


class Agreement:
    """The result of the first exchange, equal on all ranks.

    Attributes:
        fingerprint: the common fingerprint. It has the bound constants that are equal on all ranks.
        leader: the leader's proposal.
        capturing: some rank cannot measure now.
        frozen: global ranks on which tuning is forbidden. A single rank forbids it for all.
        all_have_record: every rank has the record that is used.
        will_run: every rank runs the function with the chosen config immediately.
        holder: the rank whose record all ranks use, or ``None``.
        winner: digest of the winning config in that record.
    """

    def __init__(self, ranks: Channel, name: str, proposals: Sequence[Proposal]) -> None:
        """Compare the proposals of all ranks. If they differ, all raise ``RankDisagreement``."""
        for each in zip(*(proposal.compared for proposal in proposals), strict=True):
            if len({text for _, text in each}) > 1:
                texts = {ranks.global_rank(rank): text for rank, (_, text) in enumerate(each)}
                raise ranks.record_final_error(RankDisagreement(each[ranks.rank][0], texts))
        # Bound constants may differ. All other parts of the fingerprint must be equal to rank 0's.
        first, *others = with_common_constants([proposal.fingerprint for proposal in proposals])
        if any(other != first for other in others):
            by_rank: dict[int, object] = {
                ranks.global_rank(0): "(the other ranks are compared with this rank)"
            }
            for rank, other in enumerate(others, start=1):
                by_rank[ranks.global_rank(rank)] = "; ".join(first.diff(other)) or "equal"
            what = f"the hardware, versions, source code or settings of {name}"
            raise ranks.record_final_error(RankDisagreement(what, by_rank))
        self.fingerprint = first
        verdicts = [proposal.verdict for proposal in proposals]
        self.all_have_record = len({verdict.record for verdict in verdicts}) == 1
        self.leader = proposals[0]
        self.capturing = any(proposal.capturing for proposal in proposals)
        self.frozen = [
            ranks.global_rank(r) for r, proposal in enumerate(proposals) if proposal.frozen
        ]
        self.will_run = all(proposal.will_run for proposal in proposals)
        # A record that depends on bound constants is valid only if these are equal on all ranks.
        # The holder has already compared them with the record.
        bound_names = frozenset(self.fingerprint.bound)
        valid = {
            rank: verdict
            for rank, verdict in enumerate(verdicts)
            if verdict.winner and verdict.bound in (None, bound_names)
        }
        holders = [rank for rank, verdict in valid.items() if not verdict.shipped] or list(valid)
        # A record is used despite ALWAYS_TUNE if nothing can be measured.
        cannot_tune = self.capturing or bool(self.frozen)
        usable = bool(holders) and (cannot_tune or not self.leader.always_tune)
        # Choose the lowest rank. It is the leader, if the leader has a record.
        self.holder = holders[0] if usable else None
        self.winner = None if self.holder is None else valid[self.holder].winner


def remote_record(
    parts: CommonParts,
    ranks: Channel,
    agreement: Agreement,
    key: Key,
    validator: Callable[[TuningRecord], Validity],
    may_wait: bool = False,
) -> StoredRecord | None:
    """Return the record of the leader's remote store, if there is a valid one, on every rank.

    All ranks call this after an agreement in which no rank has a record. The leader also stores the
    record in its local store. With ``may_wait``, it waits while another job tunes the key.
    """
    seconds = agreement.leader.remote_seconds
    if seconds is None or agreement.leader.always_tune:
        return None
    found, limit = None, parts.settings.seconds + seconds
    try:
        with watchdog.paused():
            if parts.remote is not None:
                found = parts.remote.find(
                    key,
                    agreement.fingerprint,
                    lambda record: not validator(record).reasons,
                    may_wait,
                )
            found = ranks.all_gather(Step("look up the remote store"), found, limit)[0]
    except BaseException:
        if parts.remote is not None:
            parts.remote.release(key, agreement.fingerprint)
        raise
    if found is not None and ranks.is_leader:
        parts.store.put(found.record)
    return found


_process_start = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
_used: set[str] = set()
"""Digests of the records that this process uses."""


def mark_used(record: TuningRecord) -> None:
    """Note that this process uses ``record``."""
    _used.add(record.digest)


def unstable_constants(record: TuningRecord, now: Fingerprint) -> str:
    """Return the constants that alone invalidate a ``record`` from an earlier program start."""
    is_earlier = False
    with suppress(ValueError, TypeError):  # no time, or no time zone
        is_earlier = datetime.datetime.fromisoformat(record.timestamp) < _process_start
    if record.digest in _used or not is_earlier:
        return ""
    differences = [each for each in record.fingerprint.compare(now) if not each.is_patch_level]
    only_constants = all(each.constant for each in differences)
    return "; ".join(each.sentence for each in differences) if only_constants else ""
