"""Begin a first call: all ranks exchange their arguments' key and check that it is equal.

Both tuners begin with this exchange, and one message carries everything. If every rank has a record
of the key, its first use in a process costs this exchange, and later uses cost none. With a record,
a first call of ``tune.autotune`` takes one more exchange: whether the recorded winner still works.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.engine.channel import Channel
from triton_dist._tuning.values import (
    Fingerprint,
    StoredRecord,
    TuningRecord,
    Validity,
    agreed,
)
from triton_dist.errors import RankDisagreement


@dataclass(frozen=True)
class Verdict:
    """Result of the look-up in a rank's own cache."""

    winner: str | None = None
    """Digest of the winning config, if there is a valid record."""
    record: str | None = None
    """Digest of that record."""
    shipped: bool = False
    """The record was shipped with a package. An own record of any rank is preferred to it."""
    bound: frozenset[str] | None = None
    """The bound constants that the record depends on; ``None``: the record ignores them."""


class OwnRecord(NamedTuple):
    """This rank's valid record and its place, or ``None`` and the reason."""

    record: TuningRecord | None
    where: str
    tolerated: str = ""
    """Accepted differences between the record and this process."""

    @property
    def verdict(self) -> Verdict:
        record = self.record
        if record is None:
            return Verdict()
        counted = None if record.shipped else frozenset(record.fingerprint.bound)
        return Verdict(record.best.digest, record.digest, record.shipped, counted)


def own_record(
    stored: Iterable[StoredRecord], validator: Callable[[TuningRecord], Validity]
) -> OwnRecord:
    """Return the first of the ``stored`` records that ``validator`` finds valid."""
    reason = ""
    for record, where in stored:
        found = validator(record)
        if not found.reasons:
            return OwnRecord(record, where, "; ".join(found.tolerated))
        # Report the reason against the nearest record: it is this function's own.
        kind = "shipped record" if record.shipped else "record"
        reason = reason or f"the {kind} in {where} is not valid: {'; '.join(found.reasons)}"
    return OwnRecord(None, reason or "no record")


@dataclass(frozen=True)
class Proposal:
    """The first message of one rank."""

    compared: Sequence[tuple[str, str]]
    """Names and texts that must be the same on all ranks, in the order of comparison."""
    fingerprint: Fingerprint
    verdict: Verdict
    always_tune: bool
    frozen: bool
    capturing: bool
    """Nothing can be measured now."""
    kept: Sequence[str] = ()
    """Digests of the configs that pruning leaves, if it was done before. The leader's are used."""
    runs: bool = False
    """The function is called with the choice at once."""


class Agreement:
    """Result of the first exchange, the same on all ranks.

    Attributes:
        fingerprint: the common fingerprint, with the bound constants that are equal on all ranks.
        leader: the leader's message.
        capturing: some rank cannot measure now.
        frozen: ranks on which tuning is forbidden; one is enough.
        all_hold_it: every rank has the record that is used.
        runs: every rank calls the function with the choice at once.
        holder: the rank whose record all ranks use; ``None`` if no record is used.
        winner: digest of the winning config in that record.
    """

    def __init__(self, ranks: Channel, name: str, proposals: Sequence[Proposal]) -> None:
        """
        Args:
            name: the function, or kernel, that is tuned.

        Raises:
            RankDisagreement: on every rank, if the compared texts or the fingerprints differ. It
                lists the values by rank.
        """
        for each in zip(*(proposal.compared for proposal in proposals), strict=True):
            if len({text for _, text in each}) > 1:
                texts = {ranks.named(rank): text for rank, (_, text) in enumerate(each)}
                raise ranks.ended_by(RankDisagreement(each[ranks.rank][0], texts))
        # Constants that functions bind may differ. Ranks are compared with rank 0, field by field.
        first, *others = agreed([proposal.fingerprint for proposal in proposals])
        if any(other != first for other in others):
            by_rank: dict[int, object] = {ranks.named(0): "(the others are compared with this)"}
            for rank, other in enumerate(others, start=1):
                by_rank[ranks.named(rank)] = "; ".join(first.diff(other)) or "the same"
            what = f"what a tuning of {name} depends on"
            raise ranks.ended_by(RankDisagreement(what, by_rank))
        self.fingerprint = first
        verdicts = [proposal.verdict for proposal in proposals]
        self.all_hold_it = len({verdict.record for verdict in verdicts}) == 1
        self.leader = proposals[0]
        self.capturing = any(proposal.capturing for proposal in proposals)
        self.frozen = [ranks.named(r) for r, proposal in enumerate(proposals) if proposal.frozen]
        self.runs = all(proposal.runs for proposal in proposals)
        # The constants that a record depends on must be equal on all ranks. The holder has already
        # checked that they are as recorded.
        counted = frozenset(self.fingerprint.bound)
        valid = {
            rank: verdict
            for rank, verdict in enumerate(verdicts)
            if verdict.winner and verdict.bound in (None, counted)
        }
        holders = [rank for rank, verdict in valid.items() if not verdict.shipped] or list(valid)
        # Where nothing can be tuned, a record is used even if it was asked to be replaced.
        cannot_tune = self.capturing or bool(self.frozen)
        usable = bool(holders) and (cannot_tune or not self.leader.always_tune)
        self.holder = holders[0] if usable else None  # the lowest, so the leader if it has one
        self.winner = None if self.holder is None else valid[self.holder].winner


_begin = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
_used: set[str] = set()
"""Digests of the records that functions of this process use."""


def mark_used(record: TuningRecord) -> None:
    """Note that this process uses ``record``."""
    _used.add(record.digest)


def unstable_constants(record: TuningRecord, now: Fingerprint) -> str:
    """Return the constants because of which a ``record`` of an earlier start is not valid ``now``.

    Empty if something else differs, or if this process used the record.
    """
    if record.digest in _used or not _is_of_earlier_start(record.timestamp):
        return ""
    differences = [each for each in record.fingerprint.compare(now) if not each.patch_level]
    only_constants = all(each.constant for each in differences)
    return "; ".join(each.sentence for each in differences) if only_constants else ""


def _is_of_earlier_start(timestamp: str) -> bool:
    try:
        return datetime.datetime.fromisoformat(timestamp) < _begin
    except (ValueError, TypeError):  # no time, or one without a zone
        return False
