"""The search that a policy names, for the candidates that there are."""

from __future__ import annotations

from collections.abc import Sequence

from triton_dist._tuning import protocols
from triton_dist._tuning.search.exploring import Exploring
from triton_dist._tuning.search.plugged import Factory, Plugged
from triton_dist._tuning.search.racing import Racing
from triton_dist._tuning.values import Candidates, Config, Outcome, Policy, Request, Unlisted


class Exhaustive:
    """The search that cannot miss the best config and needs no outcome to go on."""

    runs_user_code = False

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        """``incumbent``, if a candidate, is tried like any other."""
        self._ahead: Sequence[Config] = candidates[: policy.max_trials]
        self._remaining = iter([Request(config, policy.repeat) for config in self._ahead])

    def ask(self) -> Request | None:
        return next(self._remaining, None)

    def ahead(self) -> Sequence[Config]:
        named, self._ahead = self._ahead, ()
        return named

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Nothing to learn."""


GENERATION = 4
"""Candidates that a model chooses at a time where they are compiled ahead."""


def search_for(
    candidates: Candidates,
    policy: Policy,
    incumbent: Config | None = None,
    *,
    own: Factory | None = None,
    ahead: bool = False,
) -> protocols.Search:
    """The search for ``candidates``.

    Args:
        own: the user's, which is used if it is given.
        ahead: candidates are compiled ahead.
    """
    if own is not None:
        return Exploring(Plugged(own, candidates), candidates, policy, incumbent)
    if policy.models(candidates):
        # numpy, which takes a tenth of a second to import, is for those who search so.
        from triton_dist._tuning.search.surrogate import Surrogate

        proposer = Surrogate(candidates, GENERATION if ahead else 1)
        return Exploring(proposer, candidates, policy, incumbent)
    assert not isinstance(candidates, Unlisted)  # the decorator refused that
    kind = Exhaustive if policy.search == "exhaustive" else Racing
    return kind(candidates, policy, incumbent)
