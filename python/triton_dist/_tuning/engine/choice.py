"""The choice for a key, as calls take it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from triton_dist._tuning.engine.first_use import FirstUse
from triton_dist._tuning.engine.new_keys import NewKeys
from triton_dist._tuning.engine.span import Span
from triton_dist._tuning.values import Config, TuningRecord


@dataclass(frozen=True)
class Choice:
    """The choice for a key."""

    config: Config
    arguments: dict[str, Any]
    """Arguments of the config, ready for a call."""
    record: TuningRecord | None
    kept: bool = True
    """It holds for later calls."""
    span: Span | None = None
    """Configs by exact size, within the range of the key."""
    first_use: FirstUse | None = None
    """Set in the call that found a record."""
    tuned: bool = False
    """It was tuned in this call."""

    def of(self, sizes: tuple[int, ...]) -> Choice:
        """The choice for exact sizes."""
        if self.span is None:
            return self
        config = self.span.at(sizes[0])
        if config == self.config:
            return self
        return replace(self, config=config, arguments=config.arguments())


@dataclass(frozen=True)
class Resolution:
    """The config of a key, and how it was come by."""

    config: Config
    record: TuningRecord | None
    """``None``: it is the default, because nothing could be tuned; it is not to be kept."""
    tuned: bool
    kept: bool = True
    """It is good for later calls too: nothing better can be had by measuring then."""
    span: Span | None = None
    """Configs by exact size."""
    first_use: FirstUse | None = None
    advice: str = ""
    """Reason for tuning again that the user should know."""
    changed: tuple[str, ...] = ()
    """Names of arguments that trials changed in place and that nothing restored."""

    def choice(self) -> Choice:
        arguments = self.config.arguments()
        about = (self.kept, self.span, self.first_use, self.tuned)
        return Choice(self.config, arguments, self.record, *about)


class Choices:
    """The choices of one tuned function, which hold while the world is the same.

    Attributes:
        by_ranks: choices by ranks and key.
        hits: arguments by exact key, of calls without a group.
        group_hits: the same by group, of calls with one.
        ranges: choices by group and range; none is dropped, unlike exact keys.
        most_hits: how many exact keys are kept.
        new_keys: keys that were tuned and may not come again.
    """

    def __init__(self) -> None:
        self.by_ranks: dict[Any, Choice] = {}
        self.hits: dict[Any, dict[str, Any]] = {}
        self.group_hits: dict[Any, dict[Any, dict[str, Any]]] = {}
        self.ranges: dict[Any, Choice] = {}
        self.most_hits = 0
        self.new_keys = NewKeys()

    def agreed(self, ranks: Any) -> tuple[Any, ...]:
        """Return the keys that ``ranks`` agreed on."""
        return tuple(key for group, key in self.by_ranks if group == ranks)

    def keep(self, group: Any, key: Any, arguments: dict[str, Any]) -> None:
        """Keep the arguments of an exact key, in place of the oldest if there are many."""
        hits = self.hits if group is None else self.group_hits.setdefault(group, {})
        while len(hits) >= self.most_hits:
            with suppress(KeyError, StopIteration, RuntimeError):  # another thread was faster
                del hits[next(iter(hits))]
        hits[key] = arguments

    def drop_destroyed(self, is_destroyed: Callable[[Any], bool]) -> None:
        """Drop the choices of groups that were destroyed: a program may make many, one after
        another."""
        drop(self.group_hits, is_destroyed)
        drop(self.ranges, lambda place: is_destroyed(place[0]))
        drop(self.by_ranks, lambda place: not place[0].is_current())


def drop(table: dict[Any, Any], is_gone: Callable[[Any], bool]) -> None:
    """Drop the entries of ``table`` whose key is gone; other threads may add some meanwhile."""
    for key in list(table):
        if is_gone(key):
            table.pop(key, None)
