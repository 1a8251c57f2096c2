"""Map candidates to points of a grid, for searches that compare similar configs.

A point is a tuple of indices: for each parameter, the index of its value. Numbers are sorted, so
neighbours on the grid are similar. Other values keep the order of the config space. A grid has
holes, which are points without a candidate.

:class:`GridProposer` is the base of the searches that choose points of a grid.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.values import Candidates, Config, Point, UnlistedCandidates
from triton_dist._tuning.values.analysis import ABSENT, parameters

FloatArray = Any
"""A numpy array."""
_DRAWS_PER_POINT = 20
"""Maximum draws per requested point. ``where`` of a product space may reject most of them."""
_MAX_RANDOM_BATCHES = 50
"""Maximum number of batches of random points. ``prune_fn`` may reject most of their configs."""
NUM_RANDOM_AT_START = 20  # random configs that are tried before the model proposes configs


class Grid(ABC):
    """Grid of a set of candidates.

    Attributes:
        sizes: number of values of each parameter. Parameters with one value are left out.
        ordered: for each parameter in ``sizes``, whether its values are numbers.
    """

    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    @staticmethod
    def of(candidates: Candidates) -> Grid:
        return (
            UnlistedGrid(candidates)
            if isinstance(candidates, UnlistedCandidates)
            else ListedGrid(candidates)
        )

    @abstractmethod
    def has_point(self, point: Point) -> bool:
        """Return whether the point is in the config space, even if ``prune_fn`` rejects it."""

    @abstractmethod
    def config_at(self, point: Point) -> Config | None:
        """Return the candidate at the point, or ``None`` if the point has none."""

    @abstractmethod
    def point_of(self, config: Config) -> Point | None:
        """Return the point of ``config``, or ``None`` if it is not a candidate."""

    @abstractmethod
    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        """Return up to ``count`` random points, possibly with duplicates."""

    def randomly_changed(
        self, points: Sequence[Point], number: int, generator: np.random.Generator, count: int
    ) -> list[Point]:
        """Return up to ``count`` random points of the space. Each differs from one of ``points`` in
        at most ``number`` parameters."""
        if not points or not self.sizes:
            return []
        rows = np.array(points)[generator.integers(len(points), size=count)]
        for _ in range(number):
            axes = generator.integers(len(self.sizes), size=count)
            rows[np.arange(count), axes] = generator.integers(np.array(self.sizes)[axes])
        return [point for point in map(tuple, rows.tolist()) if self.has_point(point)]

    def neighbours(self, point: Point, max_distance: int) -> Iterator[Point]:
        """Yield the points of the space that differ from ``point`` in one parameter.

        Indices of an ordered parameter differ by at most ``max_distance``, other indices by any
        number.
        """
        for axis, index in enumerate(point):
            distance = max_distance if self.ordered[axis] else self.sizes[axis]
            first, last = max(0, index - distance), min(self.sizes[axis] - 1, index + distance)
            for other_index in range(first, last + 1):
                neighbour = (*point[:axis], other_index, *point[axis + 1 :])
                if other_index != index and self.has_point(neighbour):
                    yield neighbour


class ListedGrid(Grid):
    """Grid of a list of configs. Its parameters are all names that occur in a config."""

    def __init__(self, candidates: Sequence[Config]) -> None:
        flat = [parameters(config.tree) for config in candidates]
        names = dict.fromkeys(name for each in flat for name in each)
        texts = {name: [each.get(name, ABSENT) for each in flat] for name in names}
        orders = [_indices(list(dict.fromkeys(values))) for values in texts.values()]
        columns = [
            [index_of[text] for text in values]
            for values, (index_of, _) in zip(texts.values(), orders, strict=True)
            if len(index_of) > 1
        ]
        self.sizes = tuple(len(index_of) for index_of, _ in orders if len(index_of) > 1)
        self.ordered = tuple(ordered for index_of, ordered in orders if len(index_of) > 1)
        points: list[Point] = [tuple(row) for row in zip(*columns, strict=True)]
        points = points or [()] * len(candidates)
        # Different values may have equal texts. Add the config's position as a parameter then.
        if len(set(points)) < len(points):
            self.sizes, self.ordered = (*self.sizes, len(points)), (*self.ordered, False)
            points = [(*point, index) for index, point in enumerate(points)]
        self._configs = dict(zip(points, candidates, strict=True))
        self._points = {c.digest: p for p, c in zip(points, candidates, strict=True)}
        self._all = list(self._configs)

    def has_point(self, point: Point) -> bool:
        return point in self._configs

    def config_at(self, point: Point) -> Config | None:
        return self._configs.get(point)

    def point_of(self, config: Config) -> Point | None:
        return self._points.get(config.digest)

    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        return [self._all[index] for index in generator.integers(len(self._all), size=count)]


class UnlistedGrid(Grid):
    """Grid of a product space that is too large to list its candidates."""

    def __init__(self, candidates: UnlistedCandidates) -> None:
        self._candidates, self._product = candidates, candidates.product
        self._varying_names = [name for name, each in self._product.values.items() if len(each) > 1]
        # For each varying parameter, the grid index of each of its values in the product.
        # ``_positions`` is the inverse.
        self._grid_indices: list[list[int]] = []
        ordered = []
        for name in self._varying_names:
            texts = list(map(repr, self._product.values[name]))
            index_of, is_ordered = _indices(texts)
            self._grid_indices.append([index_of[text] for text in texts])
            ordered.append(is_ordered)
        self._positions = [[i.index(at) for at in range(len(i))] for i in self._grid_indices]
        self.sizes = tuple(map(len, self._grid_indices))
        self.ordered = tuple(ordered)

    def has_point(self, point: Point) -> bool:
        return self._product.has_point(self._full_point(point))

    def config_at(self, point: Point) -> Config | None:
        return self._candidates.config_at(self._full_point(point))

    def point_of(self, config: Config) -> Point | None:
        if config not in self._candidates:
            return None
        full_point = self._product.point_of(config)
        assert full_point is not None
        positions = (
            position
            for position, values in zip(full_point, self._product.values.values(), strict=True)
            if len(values) > 1
        )
        return tuple(each[at] for each, at in zip(self._grid_indices, positions, strict=True))

    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        points: list[Point] = []
        for _ in range(_DRAWS_PER_POINT):
            if len(points) >= count:
                break
            rows = generator.integers(self.sizes, size=(count, len(self.sizes)))
            points += filter(self.has_point, map(tuple, rows.tolist()))
        return points[:count]

    def _full_point(self, point: Point) -> Point:
        """Return the position of the value of each parameter of the product."""
        varying = zip(self._varying_names, self._positions, point, strict=True)
        positions = {name: each[index] for name, each, index in varying}
        return tuple(positions.get(name, 0) for name in self._product.values)


class GridProposer(ABC):
    """Base of proposers that choose points of a grid, each at most once, the first at random.

    ``batch_size`` configs are chosen at a time: above 1 if other processes compile them.
    """

    is_user_defined = False

    def __init__(self, candidates: Candidates, batch_size: int = 1, seed: int = 0) -> None:
        self._grid, self._batch_size = Grid.of(candidates), batch_size
        self._generator = np.random.default_rng(seed)
        self._used: set[Point] = set()
        """Points that were proposed or measured, or turned out to have no candidate."""
        self._queue: deque[tuple[Point, Config]] = deque()
        self._to_compile: list[Config] = []
        """Proposals that :meth:`upcoming_configs` has not returned."""
        self._has_proposed = False

    def ask(self) -> Config | None:
        self._propose_first()
        self._refill()
        return self._queue.popleft()[1] if self._queue else None

    @abstractmethod
    def tell(self, config: Config, milliseconds: float) -> None: ...

    def upcoming_configs(self) -> Sequence[Config]:
        self._propose_first()
        new, self._to_compile = self._to_compile, []
        return new

    @abstractmethod
    def _refill(self) -> None:
        """Add proposals to the queue if it has too few."""

    def _propose_first(self) -> None:
        if not self._has_proposed:
            self._has_proposed = True
            self._add_proposals(
                list(itertools.islice(self._random_candidates(), NUM_RANDOM_AT_START))
            )

    def _add_proposals(self, proposals: Sequence[tuple[Point, Config]]) -> None:
        self._queue += proposals
        self._to_compile += [config for _, config in proposals]

    def _random_candidates(self) -> Iterator[tuple[Point, Config]]:
        for _ in range(_MAX_RANDOM_BATCHES):
            points = self._grid.random_points(self._generator, NUM_RANDOM_AT_START)
            yield from self._new_candidates(points)

    def _new_candidates(self, points: Iterable[Point]) -> Iterator[tuple[Point, Config]]:
        """Yield the candidates at ``points`` that are not in ``_used``, and mark them as used."""
        for point in points:
            if point not in self._used:
                self._used.add(point)
                config = self._grid.config_at(point) if self._grid.has_point(point) else None
                if config is not None:
                    yield point, config


def _indices(texts: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Return the grid index of each text, and whether all texts are numbers.

    Numbers are sorted. Other texts keep their order.
    """
    try:
        ordered = sorted(texts, key=float)
    except ValueError:
        return {text: index for index, text in enumerate(texts)}, False
    return {text: index for index, text in enumerate(ordered)}, True
