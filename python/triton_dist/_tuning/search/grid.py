"""Candidates as points of a grid: for each parameter the place of its value among all its values.

Numbers are in the order of their size, so that neighbours are near; other values in that of the
space. Of a listed space the grid has holes: points that are no candidate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.values import Candidates, Config, Point, Unlisted
from triton_dist._tuning.values.analysis import ABSENT, parameters

Numbers = Any
"""A numpy array."""
_DRAWS = 20
"""Draws for each point that is wanted, at most: a rule may keep few."""


class Grid(ABC):
    """The points of some candidates.

    Attributes:
        sizes: number of values of each parameter that has several.
        ordered: for each of these, whether its values are numbers.
    """

    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    @staticmethod
    def of(candidates: Candidates) -> Grid:
        return Unseen(candidates) if isinstance(candidates, Unlisted) else Listed(candidates)

    @abstractmethod
    def has(self, point: Point) -> bool:
        """True if there may be a candidate there: its ``prune_fn`` was not asked."""

    @abstractmethod
    def config(self, point: Point) -> Config | None:
        """The candidate there, if it is one."""

    @abstractmethod
    def point(self, config: Config) -> Point | None:
        """The place of ``config``; ``None`` if it is none of the candidates."""

    @abstractmethod
    def drawn(self, draw: np.random.Generator, count: int) -> list[Point]:
        """So many points at random, or fewer; the same may come twice."""

    def changed(
        self, points: Sequence[Point], number: int, draw: np.random.Generator, count: int
    ) -> list[Point]:
        """Points, ``count`` at most, that differ from some of these in so many parameters, by any
        value, and may be candidates."""
        if not points or not self.sizes:
            return []
        rows = np.array(points)[draw.integers(len(points), size=count)]
        for _ in range(number):
            axes = draw.integers(len(self.sizes), size=count)
            rows[np.arange(count), axes] = draw.integers(np.array(self.sizes)[axes])
        return [point for point in map(tuple, rows.tolist()) if self.has(point)]

    def neighbours(self, point: Point, reach: int) -> Iterator[Point]:
        """Points that differ in one parameter, by ``reach`` steps at most if it is ordered."""
        for axis, place in enumerate(point):
            far = reach if self.ordered[axis] else self.sizes[axis]
            for other in range(max(0, place - far), min(self.sizes[axis], place + far + 1)):
                near = (*point[:axis], other, *point[axis + 1 :])
                if other != place and self.has(near):
                    yield near


class Listed(Grid):
    """The grid of a list: parameters are what its configs have in common."""

    def __init__(self, candidates: Sequence[Config]) -> None:
        flat = [parameters(config.tree) for config in candidates]
        names = dict.fromkeys(name for each in flat for name in each)
        texts = {name: [each.get(name, ABSENT) for each in flat] for name in names}
        places = [_ranks(list(dict.fromkeys(own))) for own in texts.values()]
        columns = [
            [rank[text] for text in own]
            for own, (rank, _) in zip(texts.values(), places, strict=True)
            if len(rank) > 1
        ]
        self.sizes = tuple(len(rank) for rank, _ in places if len(rank) > 1)
        self.ordered = tuple(ordered for rank, ordered in places if len(rank) > 1)
        points: list[Point] = [tuple(row) for row in zip(*columns, strict=True)]
        points = points or [()] * len(candidates)
        if len(set(points)) < len(points):  # some print alike: their places tell them apart
            self.sizes, self.ordered = (*self.sizes, len(points)), (*self.ordered, False)
            points = [(*point, place) for place, point in enumerate(points)]
        self._configs = dict(zip(points, candidates, strict=True))
        self._points = {c.digest: p for p, c in zip(points, candidates, strict=True)}
        self._all = list(self._configs)

    def has(self, point: Point) -> bool:
        return point in self._configs

    def config(self, point: Point) -> Config | None:
        return self._configs.get(point)

    def point(self, config: Config) -> Point | None:
        return self._points.get(config.digest)

    def drawn(self, draw: np.random.Generator, count: int) -> list[Point]:
        return [self._all[index] for index in draw.integers(len(self._all), size=count)]


class Unseen(Grid):
    """The grid of a product: its own, with numbers in their order."""

    def __init__(self, candidates: Unlisted) -> None:
        self._candidates, self._product = candidates, candidates.product
        self._several = [name for name, each in self._product.values.items() if len(each) > 1]
        self._ranks: list[list[int]] = []
        ordered = []
        for name in self._several:
            texts = list(map(repr, self._product.values[name]))
            rank, is_ordered = _ranks(texts)
            self._ranks.append([rank[text] for text in texts])
            ordered.append(is_ordered)
        self._places = [[own.index(at) for at in range(len(own))] for own in self._ranks]
        self.sizes = tuple(map(len, self._ranks))
        self.ordered = tuple(ordered)

    def has(self, point: Point) -> bool:
        return self._product.has(self._whole(point))

    def config(self, point: Point) -> Config | None:
        return self._candidates.config(self._whole(point))

    def point(self, config: Config) -> Point | None:
        if config not in self._candidates:
            return None
        whole = self._product.point(config)
        assert whole is not None
        places = (
            place
            for place, values in zip(whole, self._product.values.values(), strict=True)
            if len(values) > 1
        )
        return tuple(ranks[place] for ranks, place in zip(self._ranks, places, strict=True))

    def drawn(self, draw: np.random.Generator, count: int) -> list[Point]:
        found: list[Point] = []
        for _ in range(_DRAWS):
            if len(found) >= count:
                break
            rows = draw.integers(self.sizes, size=(count, len(self.sizes)))
            found += filter(self.has, map(tuple, rows.tolist()))
        return found[:count]

    def _whole(self, point: Point) -> Point:
        places = dict(zip(self._several, point, strict=True))
        own = dict(zip(self._several, self._places, strict=True))
        return tuple(own[name][places[name]] if name in own else 0 for name in self._product.values)


def _ranks(texts: Sequence[str]) -> tuple[dict[str, int], bool]:
    """The place of each, in the order of numbers if all are, and whether they are."""
    try:
        ordered = sorted(texts, key=float)
    except ValueError:
        return {text: place for place, text in enumerate(texts)}, False
    return {text: place for place, text in enumerate(ordered)}, True
