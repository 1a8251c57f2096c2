"""Search very large spaces with Optuna's TPE sampler (tree-structured Parzen estimator).

The sampler fits a density to the parameters of the fastest configs and a density to all others. It
proposes configs with a high ratio of the two. It may propose combinations that are not candidates,
which are reported to it as pruned trials, and configs that it proposed before. A repeated config is
replaced by an untried neighbour. Every third time it is replaced by a random candidate, because the
sampler may be in a local optimum.

Optuna is imported when a search starts, on the leader only. The study is in memory. The sampler has
its own random generator, so equal seeds and times lead to equal proposals.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.search.grid import Grid
from triton_dist._tuning.values import Candidates, Config, Point

FIRST = 20
"""Random candidates at the beginning."""
REACH = 16
"""Steps to the farthest neighbour in an ordered parameter. The next good value may be far, for
example the next multiple of a power of two."""
EXPLORE = 3
"""Every EXPLORE-th duplicate is replaced by a random candidate."""
_CATEGORIES = 32
"""Numeric parameters with more values are ordinal. Otherwise every value is a category, because
kernels are often fast at isolated values."""
_ATTEMPTS = 200
"""Consecutive proposals without a new candidate after which the search ends."""
_DRAWS = 50


class Tpe:
    """Proposer that uses Optuna's ``TPESampler``; proposes each config at most once.

    Args:
        generation: number of configs proposed at a time, if they are compiled ahead.
        seed: seed of all random numbers.
    """

    is_users = False

    def __init__(self, candidates: Candidates, generation: int = 1, seed: int = 0) -> None:
        import optuna

        self._grid, self._generation = Grid.of(candidates), generation
        self._draw = np.random.default_rng(seed)
        self._states, self._create_trial = optuna.trial.TrialState, optuna.trial.create_trial
        of, sizes = optuna.distributions, zip(self._grid.sizes, self._grid.ordered, strict=True)
        self._axes = {
            str(axis): of.IntDistribution(0, size - 1)
            if is_ordered and size > _CATEGORIES
            else of.CategoricalDistribution(range(size))
            for axis, (size, is_ordered) in enumerate(sizes)
        }
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=FIRST // 2, multivariate=True, constant_liar=generation > 1, seed=seed
        )
        # Creating a study logs a line. The program may use Optuna, so restore its setting.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(sampler=sampler)
        finally:
            optuna.logging.set_verbosity(verbosity)
        self._trials: dict[Point, Any] = {}
        """Proposed trials whose outcome is unknown."""
        self._seen: set[Point] = set()
        """Points that were proposed or measured, or are not candidates."""
        self._chosen: deque[Config] = deque()
        self._ahead: list[Config] = []
        self._duplicates = 0
        self._is_new = True

    def ask(self) -> Config | None:
        self._begin()
        if len(self._chosen) < self._generation:
            new = (self._next() for _ in range(self._generation))
            self._announce([config for config in new if config is not None])
        return self._chosen.popleft() if self._chosen else None

    def tell(self, config: Config, milliseconds: float) -> None:
        point = self._grid.point(config)
        if point is None:
            return
        self._seen.add(point)
        failed = milliseconds == math.inf
        # Optuna ignores failed trials and avoids the neighbourhood of pruned trials.
        state = self._states.PRUNED if failed else self._states.COMPLETE
        value = None if failed else milliseconds
        trial = self._trials.pop(point, None)
        if trial is not None:
            self._study.tell(trial, value, state=state)
            return
        # Optuna did not propose it: it is the default, a random candidate or a neighbour.
        parameters = dict(zip(self._axes, point, strict=True))
        self._study.add_trial(
            self._create_trial(
                state=state, value=value, params=parameters, distributions=self._axes
            )
        )

    def ahead(self) -> Sequence[Config]:
        self._begin()
        new, self._ahead = self._ahead, []
        return new

    def _begin(self) -> None:
        if self._is_new:
            self._is_new = False
            self._announce(list(itertools.islice(self._random(), FIRST)))

    def _announce(self, configs: Sequence[Config]) -> None:
        self._chosen += configs
        self._ahead += configs

    def _next(self) -> Config | None:
        """Return a new candidate, or ``None`` if none was found."""
        for _ in range(_ATTEMPTS):
            trial = self._study.ask(self._axes)
            point = tuple(trial.params[name] for name in self._axes)
            if point not in self._seen:
                if (config := self._new_candidate(point)) is not None:
                    self._trials[point] = trial
                    return config
                self._study.tell(trial, state=self._states.PRUNED)
                continue
            # Leave this trial out of the densities: the config already counts once.
            self._study.tell(trial, state=self._states.FAIL)
            self._duplicates += 1
            near = list(self._grid.neighbours(point, REACH))
            near = [near[place] for place in self._draw.permutation(len(near))]
            found = self._new_candidates(near)
            if self._duplicates % EXPLORE == 0:
                found = itertools.chain(self._random(), found)
            if (config := next(found, None)) is not None:
                return config
        return None

    def _random(self) -> Iterator[Config]:
        for _ in range(_DRAWS):
            points = self._grid.drawn(self._draw, FIRST)
            yield from self._new_candidates(points)

    def _new_candidates(self, points: Iterable[Point]) -> Iterator[Config]:
        return (each for each in map(self._new_candidate, points) if each is not None)

    def _new_candidate(self, point: Point) -> Config | None:
        """Return the candidate at ``point``; ``None`` if there is none or it was proposed."""
        if point in self._seen:
            return None
        self._seen.add(point)
        return self._grid.config(point) if self._grid.has(point) else None
