"""Create the search for a policy: a search of this package, or a search that the user wrote."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from triton_dist._tuning import protocols
from triton_dist._tuning.search.prior import PredictedRacing, sorted_by_predicted_time
from triton_dist._tuning.search.racing import IteratorSearch, Racing
from triton_dist._tuning.values import (
    Candidates,
    Config,
    Measurement,
    Outcome,
    Policy,
    Request,
    UnlistedCandidates,
)
from triton_dist.errors import InvalidArgument, MissingExtra

MAX_FINALISTS = 8
"""Number of the fastest configs that race at the end of a :class:`ProposalSearch`."""
_MAX_REPEATED_PROPOSALS = 1000
"""Number of consecutive proposals of tried configs after which the search ends."""


class Proposer(Protocol):
    """Source of the candidates to try. Deterministic: equal times lead to equal proposals."""

    @property
    def is_user_defined(self) -> bool:
        """True if the user wrote the search."""

    def ask(self) -> Config | None:
        """Return the next config to try, or ``None`` at the end.

        For a config that was tried before, the caller passes its known time to :meth:`tell`.
        """

    def tell(self, config: Config, milliseconds: float) -> None:
        """Record the time of a config; ``inf`` if it failed. The config need not be proposed."""

    def upcoming_configs(self) -> Sequence[Config]:
        """Return configs to compile in advance. :meth:`ask` may return them next."""


class ProposalSearch(IteratorSearch):
    """Search that samples each proposed config once or twice, then races the fastest configs.

    Args:
        policy: ``tries`` and ``max_trials`` limit the number of candidates tried;
            ``rounds[0]`` is the number of samples of each before the race.
        incumbent: the winner of an earlier tuning; tried if it is a candidate.
    """

    def __init__(
        self,
        proposer: Proposer,
        candidates: Candidates,
        policy: Policy,
        incumbent: Config | None = None,
    ) -> None:
        self._proposer, self._policy = proposer, policy
        default = _default(candidates)
        first_configs = [
            each for each in (default, incumbent) if each is not None and each in candidates
        ]
        self._first_configs = list(dict.fromkeys(first_configs))
        self._incumbent = incumbent
        self._max_tried = policy.max_tried(len(candidates))
        self._times: dict[Config, float] = {}
        self._final: Racing | None = None
        self._upcoming = self._first_configs
        self._requests = self._search()
        self.runs_user_code = isinstance(candidates, UnlistedCandidates) or proposer.is_user_defined

    def upcoming_configs(self) -> Sequence[Config]:
        return [*super().upcoming_configs(), *self._proposer.upcoming_configs()]

    def tell(self, request: Request, outcome: Outcome) -> None:
        if self._final is not None:
            self._final.tell(request, outcome)
            return
        time = math.inf
        if isinstance(outcome, Measurement):
            time = statistics.median_low(outcome.samples)
        self._times[request.config] = time
        self._proposer.tell(request.config, time)

    def _search(self) -> Iterator[Request]:
        for config in self._proposed():
            yield Request(config, self._policy.rounds[0])
        valid = [config for config, time in self._times.items() if time < math.inf]
        fastest = sorted(valid, key=self._times.__getitem__)[:MAX_FINALISTS]
        first_configs = [config for config in self._first_configs if config in valid]
        self._final = Racing(
            list(dict.fromkeys([*first_configs, *fastest])), self._policy, self._incumbent
        )
        while (request := self._final.ask()) is not None:
            yield request

    def _proposed(self) -> Iterator[Config]:
        yield from self._first_configs[: self._max_tried]
        repeated = 0
        while len(self._times) < self._max_tried and repeated < _MAX_REPEATED_PROPOSALS:
            config = self._proposer.ask()
            if config is None:
                return
            known_time = self._times.get(config)
            if known_time is None:
                repeated = 0
                yield config
            else:
                repeated += 1
                self._proposer.tell(config, known_time)


def _default(candidates: Candidates) -> Config | None:
    if isinstance(candidates, UnlistedCandidates):
        return candidates.product.default
    return candidates[0] if candidates else None


_MAX_NON_CANDIDATES = 1000
"""Number of consecutive proposals that are not candidates after which the search ends."""


class Search(Protocol):
    """Interface of a user's search, for ``tune.autotune(search=...)``.

    ``search=`` is a function that receives a dict from parameter name to its values and returns an
    object with these two methods. The search runs on rank 0 of the group only. Make it
    deterministic: to resume an interrupted tuning, the known times are passed to a new search.
    """

    def ask(self) -> Mapping[str, Any] | None:
        """Return a value for each parameter, or ``None`` at the end."""

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        """Record the time of ``config``; ``None`` if it failed or is not a candidate. Also called
        for configs that were not proposed, such as the first config of the space."""


SearchFactory = Callable[[Mapping[str, Sequence[Any]]], Search]
"""Function that creates a user's search from the values of each parameter, by name."""


class UserProposer:
    """Proposer of the candidates that a user's search proposes."""

    is_user_defined = True

    def __init__(self, factory: SearchFactory, candidates: Candidates) -> None:
        self._candidates = candidates
        if isinstance(candidates, UnlistedCandidates):
            self._by_digest: dict[str, Config] = {}
            values: dict[str, Sequence[Any]] = dict(candidates.product.values)
        else:
            self._by_digest = {config.digest: config for config in candidates}
            by_text: dict[str, dict[str, Any]] = {}
            for config in candidates:
                for name, value in config.items():
                    by_text.setdefault(name, {}).setdefault(repr(config.tree[name]), value)
            values = {name: tuple(each.values()) for name, each in by_text.items()}
        self._search = factory(values)

    def ask(self) -> Config | None:
        for _ in range(_MAX_NON_CANDIDATES):
            proposed: Any = self._search.ask()
            if proposed is None:
                return None
            if not isinstance(proposed, Mapping):
                wanted = "a dict of values by name, or None"
                raise InvalidArgument("autotune", "search: what ask() returned", proposed, wanted)
            config = self._candidate(Config(proposed))
            if config is not None:
                return config
            self._search.tell(proposed, None)
        return None

    def tell(self, config: Config, milliseconds: float) -> None:
        time = None if milliseconds == math.inf else milliseconds
        self._search.tell(config.arguments(), time)

    def upcoming_configs(self) -> Sequence[Config]:
        """Return nothing: the next proposals are unknown."""
        return ()

    def _candidate(self, config: Config) -> Config | None:
        if isinstance(self._candidates, UnlistedCandidates):
            return config if config in self._candidates else None
        return self._by_digest.get(config.digest)


class Exhaustive(IteratorSearch):
    """Search that takes ``policy.repeat`` samples of one candidate after another."""

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        self._upcoming = candidates[: policy.max_trials]
        self._requests = iter([Request(config, policy.repeat) for config in self._upcoming])

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Ignore the outcome."""


BATCH_SIZE = 4
"""Number of candidates that a model proposes at a time if compilation precedes the trials."""


def search_for(
    candidates: Candidates,
    policy: Policy,
    incumbent: Config | None = None,
    predicted_ms: Mapping[Config, float] | None = None,
    *,
    user_search: SearchFactory | None = None,
    compiles_ahead: bool = False,
) -> protocols.Search:
    """Return the search for ``candidates``. Raise ``MissingExtra`` if it needs a missing package.

    Args:
        predicted_ms: the predicted time of each candidate; empty if unknown.
        user_search: creates the search of the user, if any.
        compiles_ahead: whether other processes compile candidates before their trials.
    """
    if user_search is not None:
        return ProposalSearch(UserProposer(user_search, candidates), candidates, policy, incumbent)
    check_search(policy)
    batch_size = BATCH_SIZE if compiles_ahead else 1
    # Imported late: numpy takes 0.1 s and optuna 1 s, and only these searches need them.
    if policy.search == "optuna":
        from triton_dist._tuning.search.tpe import Tpe

        return ProposalSearch(Tpe(candidates, batch_size), candidates, policy, incumbent)
    if policy.is_model_based(candidates):
        from triton_dist._tuning.search.surrogate import Surrogate

        return ProposalSearch(Surrogate(candidates, batch_size), candidates, policy, incumbent)
    assert not isinstance(candidates, UnlistedCandidates)  # the decorator refuses it
    ordered = sorted_by_predicted_time(candidates, policy, predicted_ms or {})
    if policy.search == "exhaustive":
        return Exhaustive(ordered, policy, incumbent)
    if predicted_ms:
        return PredictedRacing(ordered, policy, incumbent, predicted_ms)
    return Racing(candidates, policy, incumbent)


def check_search(policy: Policy) -> None:
    """Raise ``MissingExtra`` if the search of ``policy`` needs a package that is not installed."""
    if policy.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise MissingExtra('autotune(search="optuna")', "optuna", "optuna")
