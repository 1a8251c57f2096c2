"""Proposes few of very many candidates: a model of what was measured says which.

Candidates at random come first. Then each time the one with the highest expected gain is taken
(:mod:`~triton_dist._tuning.search.model`), of those that differ from the fastest in one parameter
or two, and of others at random; and in every third turn an untried neighbour of the fastest one, so
that the valley that was found is walked to its bottom.

Candidates are chosen in generations, so that those of the next are compiled while one is measured:
for what is chosen and not yet measured the model takes its own forecast.

There is no randomness but that of a generator whose seed is fixed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from triton_dist._tuning.search.grid import Grid
from triton_dist._tuning.search.model import Model, gain
from triton_dist._tuning.values import Candidates, Config, Point

FIRST = 20
"""Candidates at random."""
POLISH = 3
"""In every so many turns a neighbour of the fastest is taken."""
TOPS, REACH = 4, 16
"""Neighbours of so many of the fastest are looked at, up to so many steps away: what is near a good
value may be bad, and the next good one far, as with multiples of a power of two."""
PAIRS, ANYWHERE = 150, 150
"""Candidates that are looked at besides in each turn: so many that differ from one of the fastest
in two parameters, and so many at random."""
_DRAWS = 50


class Surrogate:
    """Proposals out of ``candidates``; each config at most once.

    Args:
        generation: so many are chosen at a time, and so many more while these are measured.
        seed: of what is random.
    """

    is_users = False

    def __init__(self, candidates: Candidates, generation: int = 1, seed: int = 0) -> None:
        self._grid, self._generation = Grid.of(candidates), generation
        self._draw = np.random.default_rng(seed)
        self._model = Model(self._grid.sizes, self._grid.ordered)
        self._times: dict[Point, float] = {}
        self._seen: set[Point] = set()
        """All that were looked at and need not be again: chosen, or no candidates."""
        self._chosen: deque[tuple[Point, Config]] = deque()
        self._next: list[tuple[Point, Config]] = []
        self._ahead: list[Config] = []
        self._turn = 0

    def ask(self) -> Config | None:
        if not self._turn:
            self._begin()
        elif len(self._chosen) + len(self._next) < 2 * self._generation:
            self._turn += 1
            self._next += self._choice()
            if len(self._next) >= self._generation or not self._chosen:
                self._announce()
        return self._chosen.popleft()[1] if self._chosen else None

    def tell(self, config: Config, milliseconds: float) -> None:
        point = self._grid.point(config)
        if point is not None:
            self._seen.add(point)
            self._times[point] = milliseconds

    def ahead(self) -> Sequence[Config]:
        if not self._turn:
            self._begin()
        new, self._ahead = self._ahead, []
        return new

    def _begin(self) -> None:
        self._turn = 1
        draws = (self._grid.drawn(self._draw, FIRST) for _ in range(_DRAWS))
        for point in itertools.chain.from_iterable(draws):
            self._next += self._taken(point)
            if len(self._next) >= FIRST:
                break
        self._announce()

    def _announce(self) -> None:
        """The next generation is whole, or nothing else is left."""
        self._ahead += [config for _, config in self._next]
        self._chosen.extend(self._next)
        self._next = []

    def _taken(self, point: Point) -> list[tuple[Point, Config]]:
        """The candidate there, if there is one that was not taken."""
        if point in self._seen:
            return []
        self._seen.add(point)
        config = self._grid.config(point)
        return [] if config is None else [(point, config)]

    def _choice(self) -> list[tuple[Point, Config]]:
        """The one that promises most; none if nothing is left."""
        found = (taken for point in self._ranked() if (taken := self._taken(point)))
        return next(found, [])

    def _ranked(self) -> Iterator[Point]:
        """Untried points, the most promising first."""
        fastest = sorted(self._times, key=self._times.__getitem__)
        pool: list[Point] = []
        if self._turn % POLISH == 0:
            pool = self._fresh(fastest[:1], 1) or self._fresh(fastest[:5], 2)
        if not pool:
            pool = self._fresh(fastest[:TOPS], REACH)
            others = self._grid.changed(fastest[:TOPS], 2, self._draw, PAIRS)
            others += self._grid.drawn(self._draw, ANYWHERE)
            pool += [point for point in others if point not in self._seen]
        pool = list(dict.fromkeys(pool))
        if not pool or not fastest:
            return iter(pool)
        self._model.learn(list(self._times), list(self._times.values()))
        pending = [point for point, _ in [*self._chosen, *self._next]]
        if pending:
            self._model.believe(pending)
        value = gain(*self._model.expected(pool), self._model.best)
        return (pool[index] for index in np.argsort(-value, kind="stable"))

    def _fresh(self, points: Sequence[Point], reach: int) -> list[Point]:
        """Neighbours that were not looked at."""
        near = (each for point in points for each in self._grid.neighbours(point, reach))
        return [each for each in near if each not in self._seen]
