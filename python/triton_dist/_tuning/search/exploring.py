"""A search of more candidates than can be tried: who proposes them is told what they took.

The default and the incumbent are tried first, then what is proposed, each as often as in the first
round of a race. The fastest meet in the end in a
:class:`~triton_dist._tuning.search.racing.Racing`, the default and the incumbent with them, so a
tuning cannot do worse than not tuning.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Protocol

from triton_dist._tuning.search.racing import Racing
from triton_dist._tuning.values import (
    Candidates,
    Config,
    Measurement,
    Outcome,
    Policy,
    Request,
    Unlisted,
)

FINALISTS = 8
_IN_VAIN = 1000
"""Proposals without a new candidate after which no more are asked for."""


class Proposer(Protocol):
    """Whoever proposes candidates. With the same answers it proposes the same."""

    @property
    def is_users(self) -> bool:
        """True if it is the user's own."""

    def ask(self) -> Config | None:
        """The next to try; ``None``: it has no more. One that was tried already is answered at
        once."""

    def tell(self, config: Config, milliseconds: float) -> None:
        """Take the time of ``config``, ``inf`` if it failed; also of those not asked for."""

    def ahead(self) -> Sequence[Config]:
        """Configs that :meth:`ask` may return from now on and that were not named before."""


class Exploring:
    """A search through ``candidates`` by what ``proposer`` proposes.

    Args:
        policy: its ``tries``, at most ``max_trials``, candidates are tried.
        incumbent: winner of an earlier tuning; is tried if it is a candidate.
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
        self._tries = policy.most_tried(len(candidates))
        self._times: dict[Config, float] = {}
        self._final: Racing | None = None
        self._ahead: list[Config] = list(self._seeded)
        self._requests = self._search()
        self.runs_user_code = isinstance(candidates, Unlisted) or proposer.is_users

    def ask(self) -> Request | None:
        return next(self._requests, None)

    def ahead(self) -> Sequence[Config]:
        new, self._ahead = [*self._ahead, *self._proposer.ahead()], []
        return new

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
        """Each candidate to try, once."""
        yield from self._seeded[: self._tries]
        in_vain = 0
        while len(self._times) < self._tries and in_vain < _IN_VAIN:
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
