"""Search very large spaces by Bayesian optimisation: a model predicts the times of untried configs.

The first candidates are random. After them, the config with the highest expected improvement of the
fastest time under :class:`Model` is chosen. The choice is among random configs and configs that
differ from one of the fastest in one or two parameters. Every third choice is among the untried
neighbours of the fastest config only (local descent).

If other processes compile candidates, they are chosen in batches: one batch compiles while another
is measured. For chosen candidates without a time, the model uses its own predictions.

All random numbers are drawn from one generator with a fixed seed.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from triton_dist._tuning.search.grid import GridProposer
from triton_dist._tuning.values import Candidates, Config, Point

FloatArray = Any
"""A numpy array of floats."""
_NOISE = 0.01
"""Variance of the noise, relative to the variance of the log times of all configs."""
_MAX_CONFIGS = 300
"""Maximum number of configs in the model. The time of a fit grows with the cube of the number."""
_CLIP_FACTOR = 1.5
"""Times are clipped at this multiple of their 80th percentile: slow configs do not matter."""
_GRADIENT_STEPS, _SMALL_MODEL, _LEARN_EVERY = 4, 80, 4
"""A model with fewer than 80 configs takes 4 gradient steps per fit. A larger model takes one
step in every fourth fit, because a step costs as much as a fit."""
PRIOR_MEAN = 0.25
"""Prior mean of the weight of a parameter in the distance of two configs."""
PRIOR_DEVIATION = 0.5
"""Prior standard deviation of the logarithm of a weight."""


class Model:
    """Gaussian process that predicts the logarithm of the time of a config.

    The squared distance of two configs is a weighted sum over parameters. The term of a parameter
    is positive if the values differ. For numbers it grows with the difference of their grid
    indices. Gradient steps learn the weights by maximising the likelihood of the measured times.
    Every second fit predicts with equal weights instead, because weights learned from few measured
    times may be wrong.

    Args:
        sizes: number of values of each parameter.
        ordered: for each parameter, whether its values are numbers.
    """

    def __init__(self, sizes: Sequence[int], ordered: Sequence[bool]) -> None:
        self._sizes = tuple(sizes)
        # A parameter has one feature per value (one-hot). If its values are numbers, it has one
        # more feature: the scaled grid index. If two values differ, their one-hot features add 2
        # to the squared distance (before weighting), and the scaled grid index adds at most 2.
        numeric_axes = [axis for axis, each in enumerate(ordered) if each]
        axes = [axis for axis, size in enumerate(sizes) for _ in range(size)] + numeric_axes
        self._axis_of_feature = np.array(axes, dtype=int)
        self._index_scales = [
            (axis, math.sqrt(2) / max(sizes[axis] - 1, 1)) for axis in numeric_axes
        ]
        self._learned_weights = self._weights = np.full(len(sizes), PRIOR_MEAN)
        self._num_fits = 0
        self._stride, self._direction = np.full(len(sizes), 0.3), np.zeros(len(sizes))

    def learn(self, points: Sequence[Point], times: Sequence[float]) -> None:
        """Fit the model to measured times in ms, ``inf`` for failures.

        Of more than 300 configs, use the fastest 150 and every second one of the next 300.
        """
        kept = np.argsort(times, kind="stable")
        if len(kept) > _MAX_CONFIGS:
            half = _MAX_CONFIGS // 2
            kept = np.concatenate([kept[:half], kept[half::2]])[:_MAX_CONFIGS]
        self._features = self._features_of(points)[kept]
        self._logs = _targets(np.array(times)[kept])
        self._num_fits += 1
        self._weights = self._learned_weights
        is_small = len(kept) < _SMALL_MODEL
        steps = _GRADIENT_STEPS if is_small else int(self._num_fits % _LEARN_EVERY == 0)
        for _ in range(steps):
            self._fit()
            # Ascend the likelihood with one stride per parameter (Rprop): the stride grows while
            # the sign of the gradient stays, and shrinks when it changes.
            slope = np.outer(self._coefficients, self._coefficients) - self._inverse
            slope *= self._matrix
            row_sums, features = slope.sum(1), self._features
            by_feature = row_sums @ features**2 - ((slope @ features) * features).sum(0)
            by_parameter = np.bincount(self._axis_of_feature, by_feature, len(self._weights))
            gradient = -0.5 * self._weights * by_parameter
            gradient -= np.log(self._weights / PRIOR_MEAN) / PRIOR_DEVIATION**2
            has_turned = self._direction * gradient < 0
            self._stride = np.clip(self._stride * np.where(has_turned, 0.5, 1.2), 0.02, 0.7)
            self._direction = np.sign(gradient)
            self._weights = self._weights * np.exp(self._stride * self._direction)
        self._learned_weights = self._weights
        if self._num_fits % 2 == 0:
            self._weights = np.full(len(self._learned_weights), PRIOR_MEAN)
        self._fit()

    def assume(self, points: Sequence[Point]) -> None:
        """Add ``points`` to the model with their predicted times as if these were measured."""
        mean, _ = self.predict(points)
        self._features = np.concatenate([self._features, self._features_of(points)])
        self._logs = np.concatenate([self._logs, mean])
        self._fit()

    def predict(self, points: Sequence[Point]) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of the standardised log time of each point."""
        similarity = self._similarity(self._features_of(points), self._features)
        mean = similarity @ self._coefficients
        explained = ((similarity @ self._inverse) * similarity).sum(1)
        return mean, np.sqrt(np.maximum(1 + _NOISE - explained, 1e-9))

    @property
    def best(self) -> float:
        """Minimum of the predicted means of the measured points."""
        return float((self._matrix @ self._coefficients).min())

    def _features_of(self, points: Sequence[Point]) -> FloatArray:
        indices = np.array(points, dtype=int).reshape(len(points), len(self._sizes))
        one_hot = [np.eye(size)[indices[:, axis]] for axis, size in enumerate(self._sizes)]
        scaled = [indices[:, axis, None] * scale for axis, scale in self._index_scales]
        return np.concatenate([*one_hot, *scaled, np.zeros((len(points), 0))], axis=1)

    def _similarity(self, one: FloatArray, other: FloatArray) -> FloatArray:
        root = np.sqrt(self._weights[self._axis_of_feature])
        one, other = one * root, other * root
        squared_distance = (one**2).sum(1)[:, None] + (other**2).sum(1)[None, :] - 2 * one @ other.T
        return np.exp(-0.5 * np.maximum(squared_distance, 0.0))

    def _fit(self) -> None:
        self._matrix = self._similarity(self._features, self._features)
        self._inverse = np.linalg.inv(self._matrix + _NOISE * np.eye(len(self._logs)))
        self._coefficients = self._inverse @ self._logs


def _targets(times: FloatArray) -> FloatArray:
    """Return the logarithms of ``times``, normalised. A failure counts as the clipping limit."""
    valid = times[np.isfinite(times)]
    if not len(valid):
        return np.zeros(len(times))
    limit = _CLIP_FACTOR * float(np.quantile(valid, 0.8))
    logs = np.log(np.maximum(np.minimum(np.where(np.isfinite(times), times, limit), limit), 1e-9))
    spread = float(logs.std())
    return (logs - logs.mean()) / (spread if spread > 0 else 1.0)


def expected_improvement(mean: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """Return the expectation of ``max(best - x, 0)`` for each normally distributed ``x``."""
    z = (best - mean) / deviation
    probability = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in z]))
    return deviation * (z * probability + np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi))


DESCENT_EVERY = 3
"""Every third choice is among neighbours of the fastest config only."""
NUM_FASTEST, MAX_NEIGHBOUR_STEPS = 4, 16
"""The other choices include neighbours of the four fastest configs, up to 16 values away in one
parameter. The next good value may be far, for example the next multiple of a power of two."""
NUM_PAIRS, NUM_RANDOM = 150, 150
"""The other choices also include 150 configs that differ from one of the four fastest in two
parameters, and 150 random configs."""


@functools.cache
def _thread_pools() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


class Surrogate(GridProposer):
    """Proposer that uses :class:`Model`."""

    def __init__(self, candidates: Candidates, batch_size: int = 1, seed: int = 0) -> None:
        super().__init__(candidates, batch_size, seed)
        # With batches: two pending batches, so one compiles while the other is measured. Without:
        # one pending config, so all times are known at each choice.
        self._max_pending = 2 * batch_size if batch_size > 1 else 1
        self._model = Model(self._grid.sizes, self._grid.ordered)
        self._times: dict[Point, float] = {}
        self._next_batch: list[tuple[Point, Config]] = []
        self._num_choices = 1

    def tell(self, config: Config, milliseconds: float) -> None:
        point = self._grid.point_of(config)
        if point is not None:
            self._used.add(point)
            self._times[point] = milliseconds

    def _refill(self) -> None:
        if len(self._queue) + len(self._next_batch) < self._max_pending:
            self._num_choices += 1
            # Add the most promising candidate, if any is left.
            self._next_batch += itertools.islice(self._new_candidates(self._ranked_points()), 1)
            if len(self._next_batch) >= self._batch_size or not self._queue:
                self._add_proposals(self._next_batch)
                self._next_batch = []

    def _ranked_points(self) -> Iterator[Point]:
        fastest = sorted(self._times, key=self._times.__getitem__)
        pool: list[Point] = []
        if self._num_choices % DESCENT_EVERY == 0:
            pool = self._untried_neighbours(fastest[:1], 1)
            pool = pool or self._untried_neighbours(fastest[:5], 2)
        if not pool:
            pool = self._untried_neighbours(fastest[:NUM_FASTEST], MAX_NEIGHBOUR_STEPS)
            others = self._grid.randomly_changed(
                fastest[:NUM_FASTEST], 2, self._generator, NUM_PAIRS
            )
            others += self._grid.random_points(self._generator, NUM_RANDOM)
            pool += [point for point in others if point not in self._used]
        pool = list(dict.fromkeys(pool))
        if not pool or not fastest:
            return iter(pool)
        # Several threads of numpy do not help for matrices of this size, and wait for each other on
        # busy cores.
        controller = _thread_pools()
        with controller.limit(limits=1, user_api="blas") if controller else nullcontext():
            self._model.learn(list(self._times), list(self._times.values()))
            pending = [point for point, _ in [*self._queue, *self._next_batch]]
            if pending:
                self._model.assume(pending)
            improvement = expected_improvement(*self._model.predict(pool), self._model.best)
        return (pool[index] for index in np.argsort(-improvement, kind="stable"))

    def _untried_neighbours(self, points: Sequence[Point], max_distance: int) -> list[Point]:
        neighbours = (
            each for point in points for each in self._grid.neighbours(point, max_distance)
        )
        return [each for each in neighbours if each not in self._used]
