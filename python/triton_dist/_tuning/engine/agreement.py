"""Compare the first calls of a key on all ranks, and select the record to use.

In the first call of a key, ``tune.autotune`` and ``contextual_autotune`` exchange one
:class:`Proposal` per rank. If every rank has a valid record, ``contextual_autotune`` sends no other
message about the record. ``tune.autotune`` sends one more message: whether the recorded winner
still works. Later calls of the key send no message.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from triton_dist._tuning.engine.channel import Channel, Step
from triton_dist._tuning.engine.components import CommonComponents
from triton_dist._tuning.engine.watchdog import watchdog
from triton_dist._tuning.values import (
    Fingerprint,
    Key,
    StoredRecord,
    TuningRecord,
    Validity,
    with_equal_bound_constants,
)
from triton_dist.errors import RankDisagreement


@dataclass(frozen=True)
class RecordSummary:
    """What a rank sends about the record that it found in its own memory, files or packs."""

    winner_digest: str | None = None
    """Digest of the winning config; ``None`` if the rank has no valid record."""
    record_digest: str | None = None
    is_shipped: bool = False
    """The record is from a pack. Records of a rank's own cache are preferred."""
    bound_names: frozenset[str] | None = None
    """Names of the bound constants, such as closure cells, that the record depends on. ``None`` for
    a shipped record, which does not depend on them."""


class LocalRecord(NamedTuple):
    """Record that this rank found in its own memory, files or packs."""

    record: TuningRecord | None
    location_or_reason: str
    """Location of the record, or why there is none."""
    accepted: str = ""
    """Accepted differences between the record's fingerprint and the present fingerprint."""

    @property
    def record_summary(self) -> RecordSummary:
        record = self.record
        if record is None:
            return RecordSummary()
        bound_names = None if record.is_shipped else frozenset(record.fingerprint.bound)
        return RecordSummary(record.best.digest, record.digest, record.is_shipped, bound_names)


def local_record(
    stored: Iterable[StoredRecord], validator: Callable[[TuningRecord], Validity]
) -> LocalRecord:
    """Return the first of the ``stored`` records that ``validator`` accepts."""
    reason = ""
    for record, location in stored:
        validity = validator(record)
        if not validity.reasons:
            return LocalRecord(record, location, "; ".join(validity.accepted))
        # Report the reason against the first record only, which most likely belongs to this
        # function. Other records may belong to another function of the same name.
        kind = "shipped record" if record.is_shipped else "record"
        reason = reason or f"the {kind} in {location} is not valid: {'; '.join(validity.reasons)}"
    return LocalRecord(None, reason or "no record")


@dataclass(frozen=True)
class Proposal:
    """The first message of a rank in the first call of a key."""

    compared_texts: Sequence[tuple[str, str]]
    """Pairs of name and text. The first pair whose text differs between ranks is reported."""
    fingerprint: Fingerprint
    record_summary: RecordSummary
    always_tune: bool
    """This rank tunes although it has a record."""
    frozen: bool
    """Tuning is forbidden on this rank."""
    cannot_measure: bool
    """Nothing can be measured now, because of a CUDA-graph capture or a trace."""
    predict_only: bool = False
    """Predictions replace measurements on this rank."""
    kept_digests: Sequence[str] = ()
    """Digests of the configs that pruning keeps, if pruning has already run. The list of rank 0 is
    used."""
    will_call_function: bool = False
    """The rank runs the function with the chosen config immediately."""
    max_remote_lookup_seconds: float | None = None
    """Maximum seconds of a look-up in the remote store; ``None``: this rank makes no look-up."""


class Agreement:
    """The result of the first exchange, equal on all ranks.

    Attributes:
        fingerprint: the common fingerprint, without bound constants that differ between ranks.
        leader_proposal: the proposal of rank 0.
        cannot_measure, predict_only: the proposal of some rank has this property.
        frozen_ranks: global ranks on which tuning is forbidden. One such rank forbids it for all.
        have_equal_records: all ranks have the same record, or no rank has one.
        will_call_function: every rank runs the function with the chosen config immediately.
        record_rank: the rank whose record all ranks use; ``None`` if no record is used.
        winner_digest: digest of the winning config in this record.
    """

    def __init__(self, ranks: Channel, name: str, proposals: Sequence[Proposal]) -> None:
        """Compare ``proposals``, one per rank. If they differ, raise ``RankDisagreement``."""
        for pairs in zip(*(proposal.compared_texts for proposal in proposals), strict=True):
            if len({text for _, text in pairs}) > 1:
                texts = {ranks.global_rank(rank): text for rank, (_, text) in enumerate(pairs)}
                raise ranks.record_final_error(RankDisagreement(pairs[ranks.rank][0], texts))
        # Bound constants may differ between ranks. All other parts of the fingerprints must not.
        first, *others = with_equal_bound_constants(
            [proposal.fingerprint for proposal in proposals]
        )
        if any(other != first for other in others):
            by_rank: dict[int, object] = {
                ranks.global_rank(0): "(the other ranks are compared with this rank)"
            }
            for rank, other in enumerate(others, start=1):
                by_rank[ranks.global_rank(rank)] = "; ".join(first.diff(other)) or "equal"
            what = f"the hardware, versions, source code or settings of {name}"
            raise ranks.record_final_error(RankDisagreement(what, by_rank))
        self.fingerprint = first
        summaries = [proposal.record_summary for proposal in proposals]
        self.have_equal_records = len({summary.record_digest for summary in summaries}) == 1
        self.leader_proposal = proposals[0]
        self.cannot_measure = any(proposal.cannot_measure for proposal in proposals)
        self.predict_only = any(proposal.predict_only for proposal in proposals)
        self.frozen_ranks = [
            ranks.global_rank(r) for r, proposal in enumerate(proposals) if proposal.frozen
        ]
        self.will_call_function = all(proposal.will_call_function for proposal in proposals)
        # A record that depends on bound constants is valid only if these are equal on all ranks.
        # The rank that holds the record has already compared its values with the record.
        bound_names = frozenset(self.fingerprint.bound)
        valid = {
            rank: summary
            for rank, summary in enumerate(summaries)
            if summary.winner_digest and summary.bound_names in (None, bound_names)
        }
        own = [rank for rank, summary in valid.items() if not summary.is_shipped]
        ranks_with_record = own or list(valid)
        # If nothing can be measured, a record is used although ALWAYS_TUNE is set.
        cannot_tune = self.cannot_measure or bool(self.frozen_ranks) or self.predict_only
        usable = bool(ranks_with_record) and (cannot_tune or not self.leader_proposal.always_tune)
        # Choose the lowest rank with a record.
        self.record_rank = ranks_with_record[0] if usable else None
        self.winner_digest = (
            None if self.record_rank is None else valid[self.record_rank].winner_digest
        )


def find_remote_record(
    components: CommonComponents,
    ranks: Channel,
    agreement: Agreement,
    key: Key,
    validator: Callable[[TuningRecord], Validity],
    may_wait: bool = False,
) -> StoredRecord | None:
    """Return, on every rank, the valid record in the leader's remote store, or ``None``.

    The leader also writes the record to its local store. With ``may_wait``, it waits while another
    job tunes the key.
    """
    seconds = agreement.leader_proposal.max_remote_lookup_seconds
    if seconds is None or agreement.leader_proposal.always_tune:
        return None
    found, limit = None, components.settings.step_seconds + seconds
    try:
        with watchdog.paused():
            if components.remote is not None:
                found = components.remote.find(
                    key,
                    agreement.fingerprint,
                    lambda record: not validator(record).reasons,
                    may_wait,
                )
            found = ranks.all_gather(Step("look up the remote store"), found, limit)[0]
    except BaseException:
        if components.remote is not None:
            components.remote.release(key, agreement.fingerprint)
        raise
    if found is not None and ranks.is_leader:
        components.store.put(found.record)
    return found


_process_start = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
_used_digests: set[str] = set()
"""Digests of the records that this process uses."""


def mark_used(record: TuningRecord) -> None:
    """Note that this process uses ``record``."""
    _used_digests.add(record.digest)


def unstable_constants(record: TuningRecord, present: Fingerprint) -> str:
    """Return the constants that invalidate a ``record`` from an earlier program start, as text.

    Return an empty text if the record is valid, or if something else invalidates it too.
    """
    is_earlier = False
    with suppress(ValueError, TypeError):  # no time, or no time zone
        is_earlier = datetime.datetime.fromisoformat(record.timestamp) < _process_start
    if record.digest in _used_digests or not is_earlier:
        return ""
    differences = [each for each in record.fingerprint.compare(present) if not each.is_patch_level]
    only_constants = all(each.constant for each in differences)
    return "; ".join(each.sentence for each in differences) if only_constants else ""
