"""Search very large spaces with Optuna's TPE sampler (tree-structured Parzen estimator).

The sampler fits one density to the fastest configs and another density to all other configs. It
proposes configs with a high ratio of the first density to the second.

A proposal may be a combination of values that is not a candidate. It is reported to the sampler as
a pruned trial. A config that was proposed before is replaced by an untried neighbour. Every third
time it is replaced by a random candidate instead, because the sampler may be in a local optimum.

Optuna is imported when a search starts, on rank 0 only. The study is in memory. The sampler has its
own random generator, so equal seeds and times lead to equal proposals.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from triton_dist._tuning.search.grid import NUM_RANDOM_AT_START, GridProposer
from triton_dist._tuning.values import Candidates, Config, Point

MAX_NEIGHBOUR_STEPS = 16
"""Maximum distance, in values of a parameter, of a neighbour that replaces a repeated config."""
RANDOM_EVERY = 3
"""Every third repeated config is replaced by a random candidate, not by a neighbour."""
_MAX_CATEGORIES = 32
"""A numeric parameter with more values is passed to Optuna as integers. With fewer values, each is
a category, because kernels are often fast at isolated values."""
_MAX_ATTEMPTS = 200
"""Number of consecutive proposals of Optuna without a new candidate after which the search ends."""


class Tpe(GridProposer):
    """Proposer that uses Optuna's ``TPESampler``."""

    def __init__(self, candidates: Candidates, batch_size: int = 1, seed: int = 0) -> None:
        import optuna

        super().__init__(candidates, batch_size, seed)
        self._states, self._create_trial = optuna.trial.TrialState, optuna.trial.create_trial
        types, sizes = optuna.distributions, zip(self._grid.sizes, self._grid.ordered, strict=True)
        self._axes = {
            str(axis): types.IntDistribution(0, size - 1)
            if is_ordered and size > _MAX_CATEGORIES
            else types.CategoricalDistribution(range(size))
            for axis, (size, is_ordered) in enumerate(sizes)
        }
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=NUM_RANDOM_AT_START // 2,
            multivariate=True,
            constant_liar=batch_size > 1,
            seed=seed,
        )
        # Creating a study logs a line. Restore the log level, because the program may use Optuna.
        verbosity = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        try:
            self._study = optuna.create_study(sampler=sampler)
        finally:
            optuna.logging.set_verbosity(verbosity)
        self._trials: dict[Point, Any] = {}
        """By point: Optuna's trials that were proposed and whose time is unknown."""
        self._duplicates = 0

    def tell(self, config: Config, milliseconds: float) -> None:
        point = self._grid.point_of(config)
        if point is None:
            return
        self._used.add(point)
        failed = milliseconds == math.inf
        # Optuna ignores trials of state FAIL and avoids the neighbourhood of pruned trials.
        state = self._states.PRUNED if failed else self._states.COMPLETE
        value = None if failed else milliseconds
        trial = self._trials.pop(point, None)
        if trial is not None:
            self._study.tell(trial, value, state=state)
            return
        # Optuna did not propose this config: it is the default, a random candidate or a neighbour.
        parameters = dict(zip(self._axes, point, strict=True))
        self._study.add_trial(
            self._create_trial(
                state=state, value=value, params=parameters, distributions=self._axes
            )
        )

    def _refill(self) -> None:
        if len(self._queue) < self._batch_size:
            new = (self._new_proposal() for _ in range(self._batch_size))
            self._add_proposals([proposal for proposal in new if proposal is not None])

    def _new_proposal(self) -> tuple[Point, Config] | None:
        """Return an untried candidate, or ``None`` after too many attempts."""
        for _ in range(_MAX_ATTEMPTS):
            trial = self._study.ask(self._axes)
            point = tuple(trial.params[name] for name in self._axes)
            if point not in self._used:
                if (proposal := next(self._new_candidates([point]), None)) is not None:
                    self._trials[point] = trial
                    return proposal
                self._study.tell(trial, state=self._states.PRUNED)
                continue
            # FAIL leaves this trial out of the densities, because the config already counts once.
            self._study.tell(trial, state=self._states.FAIL)
            self._duplicates += 1
            neighbours = list(self._grid.neighbours(point, MAX_NEIGHBOUR_STEPS))
            order = self._generator.permutation(len(neighbours))
            replacements = self._new_candidates([neighbours[index] for index in order])
            if self._duplicates % RANDOM_EVERY == 0:
                replacements = itertools.chain(self._random_candidates(), replacements)
            if (proposal := next(replacements, None)) is not None:
                return proposal
        return None
