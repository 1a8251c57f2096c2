"""Search very large spaces by Bayesian optimisation: a model predicts the times of untried configs.

The first candidates are random. The next candidate has the highest expected improvement under
:class:`Model`, among configs that differ from the fastest ones in one or two parameters and random
configs. Every third candidate is an untried neighbour of the fastest config (local descent).

If candidates are compiled ahead, they are chosen in generations: one generation compiles while the
other is measured. The model uses its own predictions as the times of chosen candidates.

All random numbers come from one generator with a fixed seed.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.search.grid import Grid
from triton_dist._tuning.values import Candidates, Config, Point

Numbers = Any
"""A numpy array of floats."""
_NOISE = 0.01
"""Variance of the noise, relative to the variance of all times."""
_MOST = 300
"""Maximum number of configs in the model; the time of a prediction grows with its cube."""
_FAR = 1.5
"""Times are clipped at this multiple of the 80th percentile, because differences between slow
configs do not matter."""
_STEPS, _SMALL, _LEARN = 4, 80, 4
"""Gradient steps for each prediction while the model has fewer than _SMALL configs; then one step
in every _LEARN-th prediction, because each step costs as much as a prediction."""
PRIOR_MEAN = 0.25
"""Prior mean of the weight of a parameter."""
PRIOR_DEVIATION = 0.5
"""Prior standard deviation of the log of a weight."""


class Model:
    """Gaussian process over the logarithm of the time of a config.

    The distance of two configs is a weighted sum over parameters. Each term is positive if the
    values differ and, for numbers, grows with the number of steps between them. Gradient steps
    between predictions learn the weights by maximising the likelihood of the measurements. Every
    other prediction uses equal weights, because a few measurements may lead to wrong weights.

    Args:
        sizes: number of values of each parameter.
        ordered: for each parameter, whether its values are numbers.
    """

    def __init__(self, sizes: Sequence[int], ordered: Sequence[bool]) -> None:
        self._sizes = tuple(sizes)
        # The parameter of each feature: one feature per value (one-hot), and one for the step if
        # the values are numbers. Half the squared distance is then a sum over features.
        steps = [axis for axis, each in enumerate(ordered) if each]
        axes = [axis for axis, size in enumerate(sizes) for _ in range(size)] + steps
        self._axes = np.array(axes, dtype=int)
        self._scaled = [(axis, math.sqrt(2) / max(sizes[axis] - 1, 1)) for axis in steps]
        self._learnt = self._weights = np.full(len(sizes), PRIOR_MEAN)
        self._turn = 0
        self._stride, self._direction = np.full(len(sizes), 0.3), np.zeros(len(sizes))

    def learn(self, points: Sequence[Point], times: Sequence[float]) -> None:
        """Fit the model to measured times in ms, ``inf`` for failures.

        If there are too many configs, use the fastest and every other config of the rest.
        """
        kept = np.argsort(times, kind="stable")
        if len(kept) > _MOST:
            kept = np.concatenate([kept[: _MOST // 2], kept[_MOST // 2 :: 2]])[:_MOST]
        self._features = self._features_of(points)[kept]
        self._logs = _targets(np.array(times)[kept])
        self._turn += 1
        self._weights = self._learnt
        for _ in range(self._gradient_steps(len(kept))):
            self._fit()
            # Ascend the likelihood with one stride per parameter (Rprop): the stride grows while
            # the sign of the gradient stays, and shrinks when it changes.
            slope = np.outer(self._solved, self._solved) - self._inverse
            slope *= self._matrix
            own, features = slope.sum(1), self._features
            by_feature = own @ features**2 - ((slope @ features) * features).sum(0)
            by_parameter = np.bincount(self._axes, by_feature, len(self._weights))
            uphill = -0.5 * self._weights * by_parameter
            uphill -= np.log(self._weights / PRIOR_MEAN) / PRIOR_DEVIATION**2
            turned = self._direction * uphill < 0
            self._stride = np.clip(self._stride * np.where(turned, 0.5, 1.2), 0.02, 0.7)
            self._direction = np.sign(uphill)
            self._weights = self._weights * np.exp(self._stride * self._direction)
        self._learnt = self._weights
        if self._turn % 2 == 0:
            self._weights = np.full(len(self._learnt), PRIOR_MEAN)
        self._fit()

    def assume(self, points: Sequence[Point]) -> None:
        """Add the predicted times of pending points as if they were measured."""
        mean, _ = self.predict(points)
        self._features = np.concatenate([self._features, self._features_of(points)])
        self._logs = np.concatenate([self._logs, mean])
        self._fit()

    def predict(self, points: Sequence[Point]) -> tuple[Numbers, Numbers]:
        """Return mean and standard deviation of the standardised log time of each point."""
        near = self._near(self._features_of(points), self._features)
        mean = near @ self._solved
        known = ((near @ self._inverse) * near).sum(1)
        return mean, np.sqrt(np.maximum(1 + _NOISE - known, 1e-9))

    @property
    def best(self) -> float:
        """Lowest predicted mean of the measured points."""
        return float((self._matrix @ self._solved).min())

    def _features_of(self, points: Sequence[Point]) -> Numbers:
        places = np.array(points, dtype=int).reshape(len(points), len(self._sizes))
        values = [np.eye(size)[places[:, axis]] for axis, size in enumerate(self._sizes)]
        steps = [places[:, axis, None] * scale for axis, scale in self._scaled]
        return np.concatenate([*values, *steps, np.zeros((len(points), 0))], axis=1)

    def _near(self, one: Numbers, other: Numbers) -> Numbers:
        root = np.sqrt(self._weights[self._axes])
        one, other = one * root, other * root
        apart = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
        return np.exp(-0.5 * np.maximum(apart, 0.0))

    def _fit(self) -> None:
        self._matrix = self._near(self._features, self._features)
        noisy = self._matrix + _NOISE * np.eye(len(self._logs))
        self._inverse = np.linalg.inv(noisy)
        self._solved = self._inverse @ self._logs

    def _gradient_steps(self, number: int) -> int:
        if number < _SMALL:
            return _STEPS
        return int(self._turn % _LEARN == 0)


def _targets(times: Numbers) -> Numbers:
    """Return standardised log times; failures count as the clipping limit."""
    valid = times[np.isfinite(times)]
    if not len(valid):
        return np.zeros(len(times))
    most = _FAR * float(np.quantile(valid, 0.8))
    logs = np.log(np.maximum(np.minimum(np.where(np.isfinite(times), times, most), most), 1e-9))
    spread = float(logs.std())
    return (logs - logs.mean()) / (spread if spread > 0 else 1.0)


def expected_improvement(mean: Numbers, deviation: Numbers, best: float) -> Numbers:
    """Return by how much each point is expected to be below ``best``; points above count as 0."""
    ahead = (best - mean) / deviation
    below = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in ahead]))
    return deviation * (ahead * below + np.exp(-(ahead**2) / 2) / math.sqrt(2 * math.pi))


FIRST = 20
"""Random candidates at the beginning."""
DESCENT = 3
"""Every DESCENT-th choice is a neighbour of the fastest config."""
FASTEST, REACH = 4, 16
"""Neighbours of the FASTEST fastest configs are considered, up to REACH steps away. The next good
value may be far, for example the next multiple of a power of two."""
PAIRS, RANDOM = 150, 150
"""Numbers of further configs considered for each choice: configs that differ from one of the
fastest in two parameters, and random configs."""
_DRAWS = 50
"""Maximum number of draws of FIRST configs at the beginning; ``prune_fn`` may reject most."""


class Surrogate:
    """Proposer that uses :class:`Model`; proposes each config at most once.

    Args:
        generation: number of configs chosen at a time.
        seed: seed of the random generator.
    """

    is_users = False

    def __init__(self, candidates: Candidates, generation: int = 1, seed: int = 0) -> None:
        self._grid, self._generation = Grid.of(candidates), generation
        # Compile one generation while one is measured; else choose with all times known.
        self._most_pending = 2 * generation if generation > 1 else 1
        self._draw = np.random.default_rng(seed)
        self._model = Model(self._grid.sizes, self._grid.ordered)
        self._times: dict[Point, float] = {}
        self._seen: set[Point] = set()
        """Points that were chosen, or are not candidates."""
        self._chosen: deque[tuple[Point, Config]] = deque()
        self._next: list[tuple[Point, Config]] = []
        self._ahead: list[Config] = []
        self._turn = 0

    def ask(self) -> Config | None:
        if not self._turn:
            self._begin()
        elif len(self._chosen) + len(self._next) < self._most_pending:
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
        """Make the next generation available to :meth:`ask` and :meth:`ahead`."""
        self._ahead += [config for _, config in self._next]
        self._chosen.extend(self._next)
        self._next = []

    def _taken(self, point: Point) -> list[tuple[Point, Config]]:
        """Return a list with the candidate at ``point``; empty without one, or if it was chosen."""
        if point in self._seen:
            return []
        self._seen.add(point)
        config = self._grid.config(point)
        return [] if config is None else [(point, config)]

    def _choice(self) -> list[tuple[Point, Config]]:
        """Return a list with the most promising candidate; empty if no candidate is left."""
        found = (taken for point in self._ranked() if (taken := self._taken(point)))
        return next(found, [])

    def _ranked(self) -> Iterator[Point]:
        """Yield untried points, the most promising first."""
        fastest = sorted(self._times, key=self._times.__getitem__)
        pool: list[Point] = []
        if self._turn % DESCENT == 0:
            pool = self._fresh(fastest[:1], 1) or self._fresh(fastest[:5], 2)
        if not pool:
            pool = self._fresh(fastest[:FASTEST], REACH)
            others = self._grid.changed(fastest[:FASTEST], 2, self._draw, PAIRS)
            others += self._grid.drawn(self._draw, RANDOM)
            pool += [point for point in others if point not in self._seen]
        pool = list(dict.fromkeys(pool))
        if not pool or not fastest:
            return iter(pool)
        self._model.learn(list(self._times), list(self._times.values()))
        pending = [point for point, _ in [*self._chosen, *self._next]]
        if pending:
            self._model.assume(pending)
        value = expected_improvement(*self._model.predict(pool), self._model.best)
        return (pool[index] for index in np.argsort(-value, kind="stable"))

    def _fresh(self, points: Sequence[Point], reach: int) -> list[Point]:
        """Return the neighbours of ``points`` that are untried."""
        near = (each for point in points for each in self._grid.neighbours(point, reach))
        return [each for each in near if each not in self._seen]
