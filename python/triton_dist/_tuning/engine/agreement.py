"""How the ranks begin: each says what it came with, and all see whether that is the same.

One message carries everything, so a key that every rank has a record of costs one exchange at its
first use in a process, and later none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.values import Fingerprint, Key, agreed
from triton_dist.errors import RankDisagreement


@dataclass(frozen=True)
class Verdict:
    """What a rank's own cache has to say."""

    winner: str | None
    """Digest of the winning config, if there is a valid record."""
    record: str | None
    """Digest of that record."""
    shipped: bool = False
    """Whether it is one that came with a package, which any rank's own goes before."""
    bound: frozenset[str] | None = None
    """The bound constants that it counts; ``None``: it does not look at them."""


@dataclass(frozen=True)
class Arrival:
    """What one rank came with."""

    function: str
    key: Key
    details: str
    """Of its arguments, what must be the same besides the key."""
    space: str
    fingerprint: Fingerprint
    verdict: Verdict
    is_leader: bool = False
    always_tune: bool = False
    frozen: bool = False
    capturing: bool = False


def meet(ranks: Conversation, own: Arrival) -> Meeting:
    """Exchange arrivals, and go on only if all ranks came with the same.

    Raises:
        TuningTimeout: a rank did not come.
        RankDisagreement: on every rank, if functions, keys, details, config spaces or fingerprints
            differ, and on the others if the call of some rank was refused; says which rank has
            what.
    """
    arrivals = ranks.meet(Situation("first call of a key"), own)
    _same(ranks, "the function that is called", [arrival.function for arrival in arrivals])
    _same(ranks, f"the key of {own.function}", [_shown(arrival.key) for arrival in arrivals])
    _same(ranks, f"the arguments of {own.function}", [arrival.details for arrival in arrivals])
    _same(ranks, f"the config space of {own.function}", [arrival.space for arrival in arrivals])
    fingerprints = [arrival.fingerprint for arrival in arrivals]
    return Meeting(arrivals, same_fingerprint(ranks, own.function, fingerprints))


class Meeting:
    """What all ranks know once they met."""

    def __init__(self, arrivals: Sequence[Arrival], fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        """Of all ranks; of what functions bind it has what all hold alike."""
        self._verdicts = [arrival.verdict for arrival in arrivals]
        leader = next(rank for rank, arrival in enumerate(arrivals) if arrival.is_leader)
        self.capturing = any(arrival.capturing for arrival in arrivals)
        self.frozen = [rank for rank, arrival in enumerate(arrivals) if arrival.frozen]
        """Ranks on which tuning is forbidden; one is enough."""
        # What a record counts, all ranks must hold alike; that on the holder it is the same as
        # recorded, the holder has seen.
        counted = frozenset(fingerprint.bound)
        valid = {
            rank: v
            for rank, v in enumerate(self._verdicts)
            if v and v.winner and v.bound in (None, counted)
        }
        holders = [rank for rank, v in valid.items() if not v.shipped] or list(valid)
        # Where nothing can be tuned, a record is used even if it was asked to be replaced.
        cannot_tune = self.capturing or bool(self.frozen)
        usable = bool(holders) and (cannot_tune or not arrivals[leader].always_tune)
        self.holder = (leader if leader in holders else holders[0]) if usable else None
        """The rank whose record all use; ``None`` if there is none to be used."""

    @property
    def winner(self) -> str | None:
        """Digest of the config that all use, if there is a record."""
        verdict = None if self.holder is None else self._verdicts[self.holder]
        return verdict.winner if verdict else None

    @property
    def all_hold_it(self) -> bool:
        """Whether every rank has the very record that is used."""
        return len({verdict.record if verdict else None for verdict in self._verdicts}) == 1


def _shown(key: Key) -> str:
    return f"{key} on {key.hardware}"


def _same(ranks: Conversation, what: str, values: Sequence[str]) -> None:
    if len(set(values)) > 1:
        by_rank = {ranks.named(rank): value for rank, value in enumerate(values)}
        raise RankDisagreement(what, by_rank)


def same_fingerprint(
    ranks: Conversation, function: str, fingerprints: Sequence[Fingerprint]
) -> Fingerprint:
    """The one fingerprint of all ranks.

    Raises:
        RankDisagreement: they differ in what is no constant that a function binds. Ranks are
            compared with rank 0, field by field.
    """
    first, *others = agreed(fingerprints)
    if any(other != first for other in others):
        by_rank: dict[int, object] = {ranks.named(0): "(the others are compared with this)"}
        for rank, other in enumerate(others, start=1):
            by_rank[ranks.named(rank)] = "; ".join(first.diff(other)) or "the same"
        raise RankDisagreement(f"what a tuning of {function} depends on", by_rank)
    return first
