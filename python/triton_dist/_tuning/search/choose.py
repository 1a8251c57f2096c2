"""Create the search for a policy: a built-in search or the user's."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from triton_dist._tuning import protocols
from triton_dist._tuning.search.racing import IteratorSearch, Racing
from triton_dist._tuning.values import (
    Candidates,
    Config,
    Measurement,
    Outcome,
    Policy,
    Request,
    Unlisted,
)
from triton_dist.errors import InvalidArgument, MissingExtra

FINALISTS = 8
"""Fastest configs that race at the end."""
_MAX_VAIN_PROPOSALS = 1000
"""Consecutive proposals without a new candidate after which the search ends."""


class Proposer(Protocol):
    """Deterministic source of candidates: equal times lead to equal proposals."""

    @property
    def is_user_defined(self) -> bool:
        """True if it is the user's search."""

    def ask(self) -> Config | None:
        """Return the next config to try, or ``None`` at the end.

        If it was tried before, :meth:`tell` is called with its time, and nothing is measured.
        """

    def tell(self, config: Config, milliseconds: float) -> None:
        """Record the time of a config in ms, ``inf`` if it failed, also of one not proposed."""

    def ahead(self) -> Sequence[Config]:
        """Return configs to compile in advance. :meth:`ask` may return them next."""


class Exploring(IteratorSearch):
    """Search that takes one sample of each proposed config, then races the fastest configs.

    Args:
        policy: ``tries`` and ``max_trials`` limit the number of tried candidates.
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
        seeded = [each for each in (default, incumbent) if each is not None and each in candidates]
        self._seeded = list(dict.fromkeys(seeded))
        self._incumbent = incumbent
        self._tries = policy.max_tried(len(candidates))
        self._times: dict[Config, float] = {}
        self._final: Racing | None = None
        self._ahead = self._seeded
        self._requests = self._search()
        self.runs_user_code = isinstance(candidates, Unlisted) or proposer.is_user_defined

    def ahead(self) -> Sequence[Config]:
        return [*super().ahead(), *self._proposer.ahead()]

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
        fastest = sorted(valid, key=self._times.__getitem__)[:FINALISTS]
        seeded = [config for config in self._seeded if config in valid]
        self._final = Racing(
            list(dict.fromkeys([*seeded, *fastest])), self._policy, self._incumbent
        )
        while (request := self._final.ask()) is not None:
            yield request

    def _proposed(self) -> Iterator[Config]:
        """Yield each candidate to try, once."""
        yield from self._seeded[: self._tries]
        in_vain = 0
        while len(self._times) < self._tries and in_vain < _MAX_VAIN_PROPOSALS:
            config = self._proposer.ask()
            if config is None:
                return
            known = self._times.get(config)
            if known is None:
                in_vain = 0
                yield config
            else:
                in_vain += 1
                self._proposer.tell(config, known)


def _default(candidates: Candidates) -> Config | None:
    if isinstance(candidates, Unlisted):
        return candidates.product.default
    return candidates[0] if candidates else None


_MAX_NON_CANDIDATES = 1000
"""Consecutive proposals outside of the space after which the search ends."""


class Search(Protocol):
    """Interface of a user's search, for ``tune.autotune(search=...)``.

    The factory is called with the values of each parameter by name and returns an object with these
    two methods. The search runs on the leader only. It should be deterministic, so that an
    interrupted tuning can resume.
    """

    def ask(self) -> Mapping[str, Any] | None:
        """Return a value for each parameter, or ``None`` at the end."""

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        """Record the milliseconds of ``config``; ``None`` if it failed or is not in the space. Also
        called for configs that were not proposed, such as the default."""


Factory = Callable[[Mapping[str, Sequence[Any]]], Search]


class UserProposer:
    """Proposer that filters the proposals of a user's search for candidates."""

    is_user_defined = True

    def __init__(self, factory: Factory, candidates: Candidates) -> None:
        self._candidates = candidates
        if isinstance(candidates, Unlisted):
            self._known: dict[str, Config] = {}
            values: dict[str, Sequence[Any]] = dict(candidates.product.values)
        else:
            self._known = {config.digest: config for config in candidates}
            found: dict[str, dict[str, Any]] = {}
            for config in candidates:
                for name, value in config.items():
                    found.setdefault(name, {}).setdefault(repr(config.tree[name]), value)
            values = {name: tuple(each.values()) for name, each in found.items()}
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
        known = None if milliseconds == math.inf else milliseconds
        self._search.tell(config.arguments(), known)

    def ahead(self) -> Sequence[Config]:
        """Return nothing: the next proposals are unknown."""
        return ()

    def _candidate(self, config: Config) -> Config | None:
        if isinstance(self._candidates, Unlisted):
            return config if config in self._candidates else None
        return self._known.get(config.digest)


class Exhaustive(IteratorSearch):
    """Search that takes all samples of every candidate."""

    def __init__(
        self, candidates: Sequence[Config], policy: Policy, incumbent: Config | None = None
    ) -> None:
        """``incumbent`` is accepted for the common interface and not treated specially."""
        self._ahead = candidates[: policy.max_trials]
        self._requests = iter([Request(config, policy.repeat) for config in self._ahead])

    def tell(self, request: Request, outcome: Outcome) -> None:
        """Ignore the outcome."""


BATCH_SIZE = 4
"""Number of candidates that a model proposes at a time if they are compiled ahead."""


def search_for(
    candidates: Candidates,
    policy: Policy,
    incumbent: Config | None = None,
    *,
    own: Factory | None = None,
    ahead: bool = False,
) -> protocols.Search:
    """Return the search for ``candidates``.

    Args:
        own: the user's search, if any.
        ahead: whether candidates are compiled ahead.

    Raises:
        MissingExtra: the search needs a package that is not installed.
    """
    if own is not None:
        return Exploring(UserProposer(own, candidates), candidates, policy, incumbent)
    check_search(policy)
    batch_size = BATCH_SIZE if ahead else 1
    # Imported late: numpy takes 0.1 s and optuna 1 s, and only these searches need them.
    if policy.search == "optuna":
        from triton_dist._tuning.search.tpe import Tpe

        return Exploring(Tpe(candidates, batch_size), candidates, policy, incumbent)
    if policy.is_model_based(candidates):
        from triton_dist._tuning.search.surrogate import Surrogate

        return Exploring(Surrogate(candidates, batch_size), candidates, policy, incumbent)
    assert not isinstance(candidates, Unlisted)  # the decorator refuses it
    kind = Exhaustive if policy.search == "exhaustive" else Racing
    return kind(candidates, policy, incumbent)


def check_search(policy: Policy) -> None:
    """Raise ``MissingExtra`` if the search of ``policy`` needs a package that is not installed."""
    if policy.search == "optuna" and importlib.util.find_spec("optuna") is None:
        raise MissingExtra('autotune(search="optuna")', "optuna", "optuna")
