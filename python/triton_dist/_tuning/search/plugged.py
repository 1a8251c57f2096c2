"""A search of the user's: proposes values by name, and is told what they took."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from triton_dist._tuning.values import Candidates, Config, Unlisted
from triton_dist.errors import InvalidArgument

_NO_CANDIDATE = 1000
"""Proposals in a row that are no candidates after which no more are asked for."""


class Search(Protocol):
    """The class for ``tune.autotune(search=...)``: called with the values of each parameter by its
    name, it returns an object with these two methods. It runs on the leading rank alone, and
    should propose the same when it is told the same, so that an interrupted tuning goes on."""

    def ask(self) -> Mapping[str, Any] | None:
        """A value for each parameter; ``None``: no more."""

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        """Take the time of ``config``; ``None`` if it failed, or is no config of the space. Configs
        that were not asked for, such as the default, are told too."""


Factory = Callable[[Mapping[str, Sequence[Any]]], Search]


class Plugged:
    """The proposals of a user's search that are candidates."""

    is_users = True

    def __init__(self, factory: Factory, candidates: Candidates) -> None:
        self._candidates = candidates
        if isinstance(candidates, Unlisted):
            self._known: dict[str, Config] = {}
            values: dict[str, Sequence[Any]] = dict(candidates.product.values)
        else:
            self._known = {config.digest: config for config in candidates}
            values = _values(candidates)
        self._search = factory(values)

    def ask(self) -> Config | None:
        for _ in range(_NO_CANDIDATE):
            proposed: Any = self._search.ask()
            if proposed is None:
                return None
            if not isinstance(proposed, Mapping):
                wanted = "a dict of values by name, or None"
                raise InvalidArgument("autotune", "search: what ask() returned", proposed, wanted)
            config = self._candidate(Config(proposed))
            if config is not None:
                return config
            self._search.tell(proposed, None)
        return None

    def tell(self, config: Config, milliseconds: float) -> None:
        known = None if milliseconds == math.inf else milliseconds
        self._search.tell(config.arguments(), known)

    def ahead(self) -> Sequence[Config]:
        """Nothing: what it will ask for is not known."""
        return ()

    def _candidate(self, config: Config) -> Config | None:
        if isinstance(self._candidates, Unlisted):
            return config if config in self._candidates else None
        return self._known.get(config.digest)


def _values(candidates: Sequence[Config]) -> dict[str, Sequence[Any]]:
    """Values of each name, each once, in the order of the candidates."""
    found: dict[str, dict[str, Any]] = {}
    for config in candidates:
        for name, value in config.items():
            found.setdefault(name, {}).setdefault(repr(config.tree[name]), value)
    return {name: tuple(values.values()) for name, values in found.items()}
