"""Define a config space of all combinations of parameter values that satisfy a constraint.

Combinations are built when they are needed and not stored, so a space of a million configs is
cheap.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from triton_dist._tuning.values import codec
from triton_dist._tuning.values.config import (
    Config,
    ConfigSpace,
    PrunedConfig,
    RemainingSpace,
    prune_reason,
)
from triton_dist.errors import InvalidArgument

Point = tuple[int, ...]
"""For each parameter, the index of the chosen value in the parameter's values."""
_MAX_LISTED = 2000
"""Maximum number of combinations of a product whose configs are listed, as in any other space."""
_MAX_CHECKED_FOR_DEFAULT = 1_000_000
"""Maximum number of combinations for which ``where`` is called to find the default."""


class Product(ConfigSpace):
    """All combinations of parameter values for which ``where`` is true.

    Configs are built when they are needed, so memory and lookup time do not grow with the number of
    combinations. The default is the first combination for which ``where`` is true, in the order of
    :func:`itertools.product`.

    Args:
        parameters: dict from parameter name to its values, in order of preference. A model-based
            search treats numbers as ordered by size, whatever their position.
        where: called with a dict from parameter name to value; a true result keeps the combination.
            It is called often, so it must be cheap.

    Raises:
        InvalidArgument: there is no parameter, or a parameter has no values, duplicate values, or
            values that are not iterable.
    """

    def __init__(
        self,
        parameters: Mapping[str, Iterable[Any]],
        where: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> None:
        super().__init__(self._kept_combinations)
        if not isinstance(parameters, Mapping) or not parameters:
            raise InvalidArgument("Product", "parameters", parameters, "values by name")
        if where is not None and not callable(where):
            raise InvalidArgument("Product", "where", where, "a function of a dict, or None")
        self.values = {name: _listed(name, values) for name, values in parameters.items()}
        self.where = where
        self._indices = {name: _index_by_text(name, values) for name, values in self.values.items()}

    def __len__(self) -> int:
        """Return the number of combinations, including those that ``where`` rejects."""
        return math.prod(map(len, self.values.values()))

    @property
    def is_listed(self) -> bool:
        """True if there are few enough combinations to list and try all."""
        return len(self) <= _MAX_LISTED

    def __getitem__(self, index: Any) -> Any:
        """Return the combination at this index, even if ``where`` rejects it."""
        if not isinstance(index, int) or not -len(self) <= index < len(self):
            raise IndexError(f"{index!r} is not an index into {len(self)} combinations")
        index, point = index % len(self), []
        for values in reversed(self.values.values()):
            index, value_index = divmod(index, len(values))
            point.append(value_index)
        return self.config_at(tuple(point[::-1]))

    def __iter__(self) -> Iterator[Config]:
        return map(Config, self._kept_combinations())

    def config_at(self, point: Point) -> Config:
        return Config(self.values_at(point))

    def values_at(self, point: Point) -> dict[str, Any]:
        pairs = zip(self.values.items(), point, strict=True)
        return {name: values[index] for (name, values), index in pairs}

    def has_point(self, point: Point) -> bool:
        """Return whether ``where`` keeps the combination at ``point``."""
        return self.where is None or bool(self.where(self.values_at(point)))

    def point_of(self, config: Config) -> Point | None:
        """Return the point of ``config``; ``None`` if it is not a combination of these values."""
        return self._point_of_tree(config.tree)

    def _point_of_tree(self, tree: codec.Tree) -> Point | None:
        if not isinstance(tree, dict) or tree.keys() != self._indices.keys():
            return None
        indices = [self._indices[name].get(codec.to_json(tree[name])) for name in self._indices]
        return None if None in indices else tuple(indices)  # type: ignore[arg-type]

    def index_of(self, config: Config) -> int:
        point = self.point_of(config)
        if point is None:
            raise LookupError(f"{config} is not a combination of this product")
        index = 0
        for values, value_index in zip(self.values.values(), point, strict=True):
            index = index * len(values) + value_index
        return index

    def find(self, config_digest: str, tree: codec.Tree = None) -> Config | None:
        point = self._point_of_tree(tree)
        if point is None or not self.has_point(point):
            return None
        config = self.config_at(point)
        return config if config.digest == config_digest else None

    @functools.cached_property
    def default(self) -> Config:
        for values in itertools.islice(self._all_combinations(), _MAX_CHECKED_FOR_DEFAULT):
            if self.where is None or self.where(values):
                return Config(values)
        checked = min(len(self), _MAX_CHECKED_FOR_DEFAULT)
        expected = f"a function that keeps at least one of the first {checked} combinations"
        raise InvalidArgument("Product", "where", self.where, expected)

    @functools.cached_property
    def names(self) -> frozenset[str]:
        return frozenset(self.values)

    @functools.cached_property
    def digest(self) -> str:
        return codec.digest([[name, list(texts)] for name, texts in self._indices.items()])

    @functools.cached_property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        configs = (Config({"": value}) for values in self.values.values() for value in values)
        found = [function for config in configs for function in config.functions()]
        return tuple(dict.fromkeys([*found, *([] if self.where is None else [self.where])]))

    @functools.cached_property
    def classes(self) -> tuple[type, ...]:
        configs = (Config({"": value}) for values in self.values.values() for value in values)
        return tuple(dict.fromkeys(found for config in configs for found in config.classes()))

    def without(self, fixed: Config) -> ConfigSpace:
        where = self.where
        complete_where = None if where is None else lambda values: where({**values, **fixed})
        remaining = {name: values for name, values in self.values.items() if name not in fixed}
        if not remaining:
            return ConfigSpace([{}])
        space = _RemainingProduct(remaining, complete_where)
        space.fixed = fixed
        return space

    def prune(
        self, prune_fn: Callable[..., object] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Config] | UnlistedCandidates, list[PrunedConfig]]:
        """Return the configs that ``prune_fn`` keeps, and the pruned configs.

        If the product is too large to list, return :class:`UnlistedCandidates` and no pruned
        configs. They call ``prune_fn`` only for the configs that the search selects.
        """
        if self.is_listed:
            return super().prune(prune_fn, args, kwargs)
        return UnlistedCandidates(self, prune_fn, args, kwargs), []

    def _kept_combinations(self) -> Iterator[dict[str, Any]]:
        return (each for each in self._all_combinations() if self.where is None or self.where(each))

    def _all_combinations(self) -> Iterator[dict[str, Any]]:
        names = tuple(self.values)
        return (
            dict(zip(names, each, strict=True)) for each in itertools.product(*self.values.values())
        )


class _RemainingProduct(RemainingSpace, Product):
    """Product of the parameters that are left when the caller passes the values of others."""


class UnlistedCandidates:
    """Candidates of one call if there are too many to list.

    ``prune_fn`` is called only for configs that are looked up.

    Attributes:
        num_pruned_by_reason: number of configs that ``prune_fn`` rejected so far, by reason.
    """

    def __init__(
        self,
        product: Product,
        prune_fn: Callable[..., object] | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.product = product
        self._prune_fn, self._args, self._kwargs = prune_fn, args, kwargs
        self.num_pruned_by_reason: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of combinations, including rejected combinations."""
        return len(self.product)

    def __contains__(self, config: object) -> bool:
        return isinstance(config, Config) and config in self.product and self._keeps(config)

    def config_at(self, point: Point) -> Config | None:
        """Return the config at ``point``; ``None`` if ``prune_fn`` rejects it.

        ``where`` must keep the combination at ``point``.
        """
        config = self.product.config_at(point)
        if self._keeps(config):
            return config
        self.num_pruned_by_reason[prune_reason(self._prune_fn)] += 1
        return None

    def _keeps(self, config: Config) -> bool:
        prune_fn = self._prune_fn
        return prune_fn is None or bool(prune_fn(config, *self._args, **self._kwargs))


Candidates = Sequence[Config] | UnlistedCandidates
"""The configs that a search may try in one tuning."""


def _listed(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    if not isinstance(values, Iterable):
        raise InvalidArgument("Product", f"parameters[{name!r}]", values, "a list of values")
    return tuple(values)


def _index_by_text(name: str, values: Sequence[Any]) -> dict[str, int]:
    """Return the index of each value of a parameter, by the text of the value."""
    indices = {
        codec.to_json(Config({name: value}).tree[name]): index for index, value in enumerate(values)
    }
    if len(indices) < max(len(values), 1):
        wanted = "at least one value, and no two values with equal text"
        raise InvalidArgument("Product", f"parameters[{name!r}]", values, wanted)
    return indices
