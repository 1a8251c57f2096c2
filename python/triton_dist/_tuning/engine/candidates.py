"""The candidates of one tuning, the same on all ranks.

They are what ``prune_fn`` keeps of the config space or, if keys that differ only in size are tuned
(:mod:`~triton_dist._tuning.sizes.neighbours`), the few that are near the best there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from triton_dist._tuning.engine.channel import Conversation, Situation, timestamp
from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.engine.progress import head_of
from triton_dist._tuning.sizes.neighbours import ASKED, Neighbours
from triton_dist._tuning.sizes.size_table import Span
from triton_dist._tuning.values import (
    Candidates,
    Config,
    ConfigSpace,
    Failure,
    Fingerprint,
    Key,
    Policy,
    Pruned,
    Trial,
    TuningRecord,
    Unlisted,
    codec,
    validity,
)
from triton_dist._tuning.values.show import said
from triton_dist.errors import NoValidConfig, RankDisagreement

T = TypeVar("T")


class Prediction(NamedTuple):
    """The record that neighbours predict, or why they could not be asked; neither without them."""

    record: TuningRecord | None = None
    failure: str = ""


class Transfer:
    """All that one call takes over; every method is called on all ranks, and the leader's records
    count."""

    def __init__(
        self, parts: Parts, subject: Subject, call: Call, ranks: Conversation, pruning: Pruning
    ) -> None:
        self._parts, self._subject, self._call, self._ranks = parts, subject, call, ranks
        self._pruning = pruning
        self.cause: Exception | None = None
        """Error that a prediction met on this rank."""

    @property
    def measured_at(self) -> tuple[int, ...]:
        """The exact sizes of the call, where they are not the ends of their ranges."""
        sizes, call = self._subject.sizes, self._call
        return () if sizes is None or sizes.values(call.key) == call.sizes else call.sizes

    def few(
        self, key: Key, fingerprint: Fingerprint, kept: Sequence[Config]
    ) -> tuple[Sequence[Config], str]:
        """On the leader: the candidates of ``kept`` that neighbours leave, and which neighbours;
        all, if there are none."""
        settings = self._parts.settings
        if settings.transfer_ms > 0 and not settings.always_tune:
            near = self._neighbours(key, fingerprint)
            if near is not None and near.know(kept):
                few = near.candidates(kept, settings.transfer_ms)
                return (few, f"carried over from {near}") if few else (kept, "")
        return kept, ""

    def predicted(self, key: Key, fingerprint: Fingerprint) -> Prediction:
        """The record for ``key`` by its neighbours, without measuring."""
        if self._subject.sizes is None:
            return Prediction()
        own = self._predict(key, fingerprint) if self._ranks.is_leader else Prediction()
        return self._told("predict", own)

    def span(self, key: Key, fingerprint: Fingerprint, record: TuningRecord) -> Span | None:
        """Configs by exact size, of a function with one size."""
        subject = self._subject
        if subject.sizes is None or len(self._call.sizes) != 1:
            return None
        near = self._neighbours(key, fingerprint) if self._ranks.is_leader else None
        own = None
        if near is not None:
            apart = near.family.are_apart
            kind = apart(near.family.sizes)
            others = [each for each in near.all if apart(each.sizes) == kind]
            own = near.times(record, self._usable(record), others)
        times = self._told("sizes", own)
        return None if times is None else Span.of(times, subject.space)

    def _predict(self, key: Key, fingerprint: Fingerprint) -> Prediction:
        near = self._neighbours(key, fingerprint)
        if near is None or not near.all:
            return Prediction()
        self.cause, raised = self._pruning.answer.failure, self._pruning.answer.raised
        if self.cause is None:
            try:
                return Prediction(near.predict(key, self._pruning.answer.listed, timestamp()))
            except Exception as error:  # of one of those
                self.cause, raised = error, f"{ASKED} raised {said(error)}"
        return Prediction(failure=f"{raised} on rank {self._ranks.named(0)}")

    def _usable(self, record: TuningRecord) -> list[Config]:
        """Configs in ``record`` that may be used besides the winner: those of one's own passed
        ``prune_fn`` when they were measured, those of a shipped one have to pass it here."""
        space = self._subject.space
        kept = self._pruning.answer.listed if record.shipped else space
        winner = space.find(record.best.digest, record.best.config)
        return [*kept] if winner is None or winner in kept else [winner, *kept]

    def _told(self, phase: str, own: T) -> T:
        """The leader's value."""
        return self._ranks.decide(Situation(phase), (own,), self._parts.settings.seconds)[0]

    def _neighbours(self, key: Key, fingerprint: Fingerprint) -> Neighbours | None:
        """Return the neighbours of ``key``; ``None`` if the function has no sizes."""
        parts, subject = self._parts, self._subject
        if subject.sizes is None:
            return None

        def is_valid(record: TuningRecord) -> bool:
            return not validity(record, fingerprint, subject.space, parts.settings.strict).reasons

        records = (record for record, _ in parts.store.records_of(key))
        value, safe_kind = self._call.key, subject.safe_kind
        return Neighbours.of(subject.sizes, safe_kind, key, value, records, is_valid)


class Answer(NamedTuple):
    """The configs that may be used, and the others with the reason; both empty after a failure."""

    kept: Candidates = ()
    dropped: Sequence[Pruned] = ()
    failure: Exception | None = None
    """Raised by ``prune_fn``, or a ``TimeoutError``."""

    @property
    def listed(self) -> Sequence[Config]:
        """The same, of a space that is listed, as that of a function with sizes is."""
        if isinstance(self.kept, Unlisted):
            raise TypeError(f"a space of {len(self.kept)} combinations is not listed")
        return self.kept

    @property
    def raised(self) -> str:
        """The failure in words; empty if there is none."""
        error = self.failure
        return "" if error is None else f"prune_fn raised {said(error)}"


class Pruning:
    """Asks about ``call``, when the answer is first looked at."""

    def __init__(self, subject: Subject, call: Call, ranks: Conversation) -> None:
        self._subject, self._call, self._ranks = subject, call, ranks
        self._answer: Answer | None = None

    def forget(self) -> None:
        """Drop the answer, whose failure holds frames that hold this."""
        self._answer = None

    @property
    def answer(self) -> Answer:
        """Do not keep it in a local variable: its failure holds the frame of the first caller."""
        if self._answer is None:
            self._answer = self._ask()
        return self._answer

    def _ask(self) -> Answer:
        subject, call = self._subject, self._call
        try:
            with self._ranks.user_code(Situation("prune_fn")) as watch:
                watch.begin()
                return Answer(*subject.space.prune(subject.prune_fn, call.args, call.kwargs))
        except Exception as error:
            return Answer(failure=error)


MOST_LISTED = 1000
"""Pruned configs that a record lists; of more it has the numbers by reason."""


@dataclass(frozen=True)
class _Plan:
    """Result of the leader's ``prune_fn`` on the config space, by place."""

    kept: tuple[int, ...] | None = ()
    """``None``: they are too many to be listed."""
    pruned: tuple[tuple[int, str], ...] = ()
    carried: str = ""
    """Neighbours that left so few of them."""
    failure: str | None = None
    raising: str = "prune_fn"
    """The user's function that raised it."""


class Field:
    """The configs that may be tried.

    Attributes:
        candidates: on the leader, all; of those that are not listed another rank learns one by one.
        carried: neighbours that left so few of them.
    """

    def __init__(
        self, space: ConfigSpace, candidates: Candidates, pruned: list[Pruned], carried: str
    ) -> None:
        self._space, self._pruned = space, pruned
        self.candidates, self.carried = candidates, carried
        self._labels: dict[str, str] = {}
        if not isinstance(candidates, Unlisted):
            total = len(candidates)
            for place, config in enumerate(candidates, start=1):
                self._labels[config.digest] = f"{place}/{total}"

    def label(self, config: Config, policy: Policy) -> str:
        """The place of ``config`` among the candidates; of those that are not listed, among those
        that are tried."""
        if config.digest not in self._labels:
            place = f"{len(self._labels) + 1}/{policy.most_tried(len(self.candidates))}"
            self._labels[config.digest] = place
        return self._labels[config.digest]

    def shown(self, policy: Policy) -> str:
        """The number of candidates in words."""
        number = len(self.candidates)
        if isinstance(self.candidates, Unlisted):
            return f"{policy.most_tried(number)} of {number:,} combinations"
        return f"{number} configs ({len(self._pruned)} pruned)"

    @property
    def head(self) -> codec.Tree:
        """Tells these candidates from others, in a journal."""
        if isinstance(self.candidates, Unlisted):
            return {"number": len(self.candidates), "digest": self._space.digest}
        return head_of(self.candidates)

    @property
    def pruned(self) -> int:
        return len(self._pruned)

    def place(self, config: Config) -> int:
        return self._space.place(config)

    def pruned_trials(self) -> list[Trial]:
        """A trial for each config that was pruned, if these are few."""
        few = self._pruned if len(self._pruned) <= MOST_LISTED else []
        return [Trial.of(each.config, Failure("pruned", each.reason)) for each in few]

    def dropped(self) -> dict[str, int]:
        """Numbers by reason of configs that were pruned and are not listed; on the leader."""
        if isinstance(self.candidates, Unlisted):
            return dict(self.candidates.dropped)
        many = self._pruned if len(self._pruned) > MOST_LISTED else []
        return dict(Counter(each.reason for each in many))


def field_of(
    subject: Subject,
    parts: Parts,
    call: Call,
    ranks: Conversation,
    pruning: Pruning,
    key: Key,
    few_of: Callable[[Sequence[Config]], tuple[Sequence[Config], str]] = lambda kept: (kept, ""),
) -> Field:
    """The configs that the leader's ``prune_fn`` leaves; the others' is not asked. Of them those
    that the leader's ``few_of`` leaves, which says why.

    Raises:
        NoValidConfig: ``prune_fn`` leaves nothing; on every rank.
        RankDisagreement: the leader's ``prune_fn``, ``safe_fn`` or ``waves_fn`` raised, which it
            raises itself.
    """
    space, plan = subject.space, _Plan()
    answer = pruning.answer if ranks.is_leader else Answer()
    failure = answer.failure
    if failure is not None:
        plan = _Plan(failure=answer.raised)
    elif isinstance(answer.kept, Unlisted):
        plan = _Plan(kept=None)
    elif ranks.is_leader:
        try:
            few, carried = few_of(answer.kept)
            plan = _Plan(
                tuple(map(space.place, few)),
                tuple((space.place(each.config), each.reason) for each in answer.dropped),
                carried,
            )
        except Exception as error:  # of the user's functions that it asks
            failure = error
            plan = _Plan(failure=f"{ASKED} raised {said(error)}", raising=ASKED)
    decided = ranks.decide(Situation("prune_fn"), plan, parts.settings.seconds)
    if failure is not None:
        try:
            raise failure
        finally:
            del answer, failure  # the error holds this frame
    if decided.failure is not None:
        raised = {ranks.named(0): decided.failure}
        raise RankDisagreement(f"{decided.raising} of {subject.name}", raised)
    if decided.kept is None:
        own = answer.kept if ranks.is_leader else space.prune(None, (), {})[0]
        return Field(space, own, [], "")
    candidates = [space[place] for place in decided.kept]
    pruned = [Pruned(space[place], reason) for place, reason in decided.pruned]
    if not candidates:
        causes: Mapping[str, str] = {str(each.config): each.reason for each in pruned}
        raise NoValidConfig(subject.name, key, causes)
    return Field(space, candidates, pruned, decided.carried)
