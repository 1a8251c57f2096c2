"""The candidates of one tuning: the same on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from triton_dist._tuning.engine.conversation import Conversation, Situation
from triton_dist._tuning.engine.parts import Call, Parts, Subject
from triton_dist._tuning.engine.progress import head_of
from triton_dist._tuning.engine.pruning import Answer, Pruning
from triton_dist._tuning.engine.transfer import ASKED
from triton_dist._tuning.values import (
    Candidates,
    Config,
    ConfigSpace,
    Failure,
    Key,
    Policy,
    Pruned,
    Trial,
    Unlisted,
    codec,
)
from triton_dist._tuning.values.show import said
from triton_dist.errors import NoValidConfig, RankDisagreement

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
