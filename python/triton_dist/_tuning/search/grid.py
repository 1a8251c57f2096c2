"""Map candidates to points of a grid. A point has the index of the value of each parameter.

Numbers are sorted, so neighbours on the grid are similar. Other values keep the order of the space.
A grid has holes: points without a candidate.

:class:`GridProposer` has the common parts of searches that choose points of a grid.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from triton_dist._tuning.values import Candidates, Config, Point, Unlisted
from triton_dist._tuning.values.analysis import ABSENT, parameters

Numbers = Any
"""A numpy array."""
_DRAWS = 20
"""Maximum number of draws for each requested point; ``where`` may reject most of them."""
_MAX_DRAWS = 50
"""Maximum number of draws of random candidates; ``prune_fn`` may reject most."""
NUM_RANDOM_FIRST = 20
"""Random candidates at the beginning of a search."""


class Grid(ABC):
    """Grid of a set of candidates.

    Attributes:
        sizes: number of values of each parameter with more than one value.
        ordered: for each of these parameters, whether its values are numbers.
    """

    sizes: tuple[int, ...]
    ordered: tuple[bool, ...]

    @staticmethod
    def of(candidates: Candidates) -> Grid:
        return (
            UnlistedGrid(candidates) if isinstance(candidates, Unlisted) else ListedGrid(candidates)
        )

    @abstractmethod
    def has(self, point: Point) -> bool:
        """Return whether the point may be a candidate; ``prune_fn`` is not called."""

    @abstractmethod
    def config(self, point: Point) -> Config | None:
        """Return the candidate at the point, or ``None``."""

    @abstractmethod
    def point(self, config: Config) -> Point | None:
        """Return the point of ``config``, or ``None`` if it is not a candidate."""

    @abstractmethod
    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        """Return up to ``count`` random points, possibly with duplicates."""

    def randomly_changed(
        self, points: Sequence[Point], number: int, generator: np.random.Generator, count: int
    ) -> list[Point]:
        """Return up to ``count`` possible candidates that differ from one of ``points`` in at most
        ``number`` parameters."""
        if not points or not self.sizes:
            return []
        rows = np.array(points)[generator.integers(len(points), size=count)]
        for _ in range(number):
            axes = generator.integers(len(self.sizes), size=count)
            rows[np.arange(count), axes] = generator.integers(np.array(self.sizes)[axes])
        return [point for point in map(tuple, rows.tolist()) if self.has(point)]

    def neighbours(self, point: Point, reach: int) -> Iterator[Point]:
        """Yield the points that differ in one parameter, by at most ``reach`` steps if ordered."""
        for axis, index in enumerate(point):
            far = reach if self.ordered[axis] else self.sizes[axis]
            for other in range(max(0, index - far), min(self.sizes[axis], index + far + 1)):
                near = (*point[:axis], other, *point[axis + 1 :])
                if other != index and self.has(near):
                    yield near


class ListedGrid(Grid):
    """Grid of a list of configs. Its parameters are the names in the configs."""

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
        if len(set(points)) < len(points):  # some have equal texts: add the index as a parameter
            self.sizes, self.ordered = (*self.sizes, len(points)), (*self.ordered, False)
            points = [(*point, index) for index, point in enumerate(points)]
        self._configs = dict(zip(points, candidates, strict=True))
        self._points = {c.digest: p for p, c in zip(points, candidates, strict=True)}
        self._all = list(self._configs)

    def has(self, point: Point) -> bool:
        return point in self._configs

    def config(self, point: Point) -> Config | None:
        return self._configs.get(point)

    def point(self, config: Config) -> Point | None:
        return self._points.get(config.digest)

    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        return [self._all[index] for index in generator.integers(len(self._all), size=count)]


class UnlistedGrid(Grid):
    """Grid of a ``Product``, whose candidates are not listed."""

    def __init__(self, candidates: Unlisted) -> None:
        self._candidates, self._product = candidates, candidates.product
        self._varying_names = [name for name, each in self._product.values.items() if len(each) > 1]
        self._ranks: list[list[int]] = []
        ordered = []
        for name in self._varying_names:
            texts = list(map(repr, self._product.values[name]))
            rank, is_ordered = _ranks(texts)
            self._ranks.append([rank[text] for text in texts])
            ordered.append(is_ordered)
        self._places = [[own.index(at) for at in range(len(own))] for own in self._ranks]
        self.sizes = tuple(map(len, self._ranks))
        self.ordered = tuple(ordered)

    def has(self, point: Point) -> bool:
        return self._product.has(self._full_point(point))

    def config(self, point: Point) -> Config | None:
        return self._candidates.config(self._full_point(point))

    def point(self, config: Config) -> Point | None:
        if config not in self._candidates:
            return None
        whole = self._product.point(config)
        assert whole is not None
        places = (
            index
            for index, values in zip(whole, self._product.values.values(), strict=True)
            if len(values) > 1
        )
        return tuple(ranks[index] for ranks, index in zip(self._ranks, places, strict=True))

    def random_points(self, generator: np.random.Generator, count: int) -> list[Point]:
        found: list[Point] = []
        for _ in range(_DRAWS):
            if len(found) >= count:
                break
            rows = generator.integers(self.sizes, size=(count, len(self.sizes)))
            found += filter(self.has, map(tuple, rows.tolist()))
        return found[:count]

    def _full_point(self, point: Point) -> Point:
        places = dict(zip(self._varying_names, point, strict=True))
        own = dict(zip(self._varying_names, self._places, strict=True))
        return tuple(own[name][places[name]] if name in own else 0 for name in self._product.values)


class GridProposer(ABC):
    """Proposer of points of a grid: first random ones. Proposes each config at most once.

    Args:
        batch_size: number of configs chosen at a time, if they are compiled ahead.
        seed: seed of all random numbers.
    """

    is_user_defined = False

    def __init__(self, candidates: Candidates, batch_size: int = 1, seed: int = 0) -> None:
        self._grid, self._batch_size = Grid.of(candidates), batch_size
        self._generator = np.random.default_rng(seed)
        self._used: set[Point] = set()
        """Points that were proposed or measured, or are not candidates."""
        self._queue: deque[tuple[Point, Config]] = deque()
        self._to_compile: list[Config] = []
        self._has_proposed = False

    def ask(self) -> Config | None:
        self._propose_first()
        self._refill()
        return self._queue.popleft()[1] if self._queue else None

    @abstractmethod
    def tell(self, config: Config, milliseconds: float) -> None: ...

    def ahead(self) -> Sequence[Config]:
        self._propose_first()
        new, self._to_compile = self._to_compile, []
        return new

    @abstractmethod
    def _refill(self) -> None:
        """Add proposals if too few are in the queue."""

    def _propose_first(self) -> None:
        if not self._has_proposed:
            self._has_proposed = True
            self._add_proposals(list(itertools.islice(self._random_candidates(), NUM_RANDOM_FIRST)))

    def _add_proposals(self, proposals: Sequence[tuple[Point, Config]]) -> None:
        """Make proposals available to :meth:`ask` and :meth:`ahead`."""
        self._queue += proposals
        self._to_compile += [config for _, config in proposals]

    def _random_candidates(self) -> Iterator[tuple[Point, Config]]:
        for _ in range(_MAX_DRAWS):
            points = self._grid.random_points(self._generator, NUM_RANDOM_FIRST)
            yield from self._new_candidates(points)

    def _new_candidates(self, points: Iterable[Point]) -> Iterator[tuple[Point, Config]]:
        """Yield the candidates at ``points`` that were not proposed."""
        for point in points:
            if point not in self._used:
                self._used.add(point)
                config = self._grid.config(point) if self._grid.has(point) else None
                if config is not None:
                    yield point, config


def _ranks(texts: Sequence[str]) -> tuple[dict[str, int], bool]:
    """Return the index of each text, in numeric order if all are numbers, and whether they are."""
    try:
        ordered = sorted(texts, key=float)
    except ValueError:
        return {text: index for index, text in enumerate(texts)}, False
    return {text: index for index, text in enumerate(ordered)}, True
