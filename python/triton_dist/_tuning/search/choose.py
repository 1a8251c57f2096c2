"""The search that a policy names, for the candidates that there are."""

from __future__ import annotations

from triton_dist._tuning import protocols
from triton_dist._tuning.search.exhaustive import Exhaustive
from triton_dist._tuning.search.exploring import Exploring
from triton_dist._tuning.search.plugged import Factory, Plugged
from triton_dist._tuning.search.racing import Racing
from triton_dist._tuning.values import Candidates, Config, Policy, Unlisted

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
