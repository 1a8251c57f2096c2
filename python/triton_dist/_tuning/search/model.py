"""A Gaussian process on the log of the time, which says of an untried config what it may take.

How near two configs are is a sum over parameters: whether their values differ, and, of numbers, by
how many steps. How much each parameter counts, its weight, is learnt with the rest, by raising the
likelihood of what was measured: a step up the hill each time that the model is asked. In every
other turn all weigh alike: of few measurements a model may have learnt what is not so, and looks
for the best where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.values import Point

Numbers = Any
"""A numpy array of floats."""
_NOISE = 0.01
"""Variance of a time about what its config explains, relative to that of all times."""
_MOST = 300
"""Configs that the model is made of; its time grows with the cube of that."""
_FAR = 1.5
"""A time beyond so many times the fourth fifth is cut down to that: how bad the bad are teaches
nothing about the good."""
_STEPS, _SMALL = 4, 80
"""Steps up the hill, of a model of few configs, which takes little time."""
ALIKE = 0.25
"""Weight of a parameter of which nothing is known."""
PRIOR = 0.5
"""Standard deviation of the log of a weight about that."""


class Model:
    """Knowledge of the points of a grid.

    Args:
        sizes: number of values by parameter.
        ordered: whether they are numbers, by parameter.
    """

    def __init__(self, sizes: Sequence[int], ordered: Sequence[bool]) -> None:
        self._sizes = tuple(sizes)
        # By feature, the parameter that it is of: one feature for each value, then, of numbers, one
        # for the step. Half the squared distance is then a sum over features.
        steps = [axis for axis, each in enumerate(ordered) if each]
        axes = [axis for axis, size in enumerate(sizes) for _ in range(size)] + steps
        self._axes = np.array(axes, dtype=int)
        self._scaled = [(axis, math.sqrt(2) / max(sizes[axis] - 1, 1)) for axis in steps]
        self._learnt = self._weights = np.full(len(sizes), ALIKE)
        self._turn = 0
        self._stride, self._direction = np.full(len(sizes), 0.3), np.zeros(len(sizes))

    def learn(self, points: Sequence[Point], times: Sequence[float]) -> None:
        """Take what was measured, ``inf`` where it failed. Of very many the fastest count, and
        every other one of the rest."""
        kept = np.argsort(times, kind="stable")
        if len(kept) > _MOST:
            kept = np.concatenate([kept[: _MOST // 2], kept[_MOST // 2 :: 2]])[:_MOST]
        self._features = self._features_of(points)[kept]
        self._logs = _targets(np.array(times)[kept])
        self._turn += 1
        self._weights = self._learnt
        for _ in range(_STEPS if len(kept) < _SMALL else 1):
            self._fit()
            self._climb()
        self._learnt = self._weights
        if self._turn % 2 == 0:
            self._weights = np.full(len(self._learnt), ALIKE)
        self._fit()

    def believe(self, points: Sequence[Point]) -> None:
        """Take the forecasts of points as if they had been measured: they are about to be."""
        mean, _ = self.expected(points)
        self._features = np.concatenate([self._features, self._features_of(points)])
        self._logs = np.concatenate([self._logs, mean])
        self._fit()

    def expected(self, points: Sequence[Point]) -> tuple[Numbers, Numbers]:
        """Mean and standard deviation of the standardised log of the time of each."""
        near = self._near(self._features_of(points), self._features)
        mean = near @ self._solved
        left = near @ self._inverse.T
        return mean, np.sqrt(np.maximum(1 + _NOISE - (left**2).sum(1), 1e-9))

    @property
    def best(self) -> float:
        """The lowest mean of what was measured."""
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
        self._inverse = np.linalg.inv(np.linalg.cholesky(noisy))
        self._solved = self._inverse.T @ (self._inverse @ self._logs)

    def _climb(self) -> None:
        """Let each parameter count more or less, as makes what was measured likelier: by a stride
        of its own, which grows while the direction stays and shrinks where it turns."""
        slope = np.outer(self._solved, self._solved) - self._inverse.T @ self._inverse
        slope *= self._matrix
        own, features = slope.sum(1), self._features
        by_feature = own @ features**2 - ((slope @ features) * features).sum(0)
        by_parameter = np.bincount(self._axes, by_feature, len(self._weights))
        uphill = -0.5 * self._weights * by_parameter
        uphill -= np.log(self._weights / ALIKE) / PRIOR**2
        turned = self._direction * uphill < 0
        self._stride = np.clip(self._stride * np.where(turned, 0.5, 1.2), 0.02, 0.7)
        self._direction = np.sign(uphill)
        self._weights = self._weights * np.exp(self._stride * self._direction)


def _targets(times: Numbers) -> Numbers:
    """Standardised logs of times; of failures, as the worst that counts."""
    valid = times[np.isfinite(times)]
    if not len(valid):
        return np.zeros(len(times))
    most = _FAR * float(np.quantile(valid, 0.8))
    logs = np.log(np.maximum(np.minimum(np.where(np.isfinite(times), times, most), most), 1e-9))
    spread = float(logs.std())
    return (logs - logs.mean()) / (spread if spread > 0 else 1.0)


def gain(mean: Numbers, deviation: Numbers, best: float) -> Numbers:
    """Expected distance of each below ``best``."""
    ahead = (best - mean) / deviation
    below = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in ahead]))
    return deviation * (ahead * below + np.exp(-(ahead**2) / 2) / math.sqrt(2 * math.pi))
