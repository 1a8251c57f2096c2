"""The choice for a key, as calls take it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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

    def of(self, sizes: tuple[int, ...]) -> Choice:
        """The choice for exact sizes."""
        if self.span is None:
            return self
        config = self.span.at(sizes[0])
        if config == self.config:
            return self
        return replace(self, config=config, arguments=config.arguments())


def drop(table: dict[Any, Any], is_gone: Callable[[Any], bool]) -> None:
    """Drop the entries of ``table`` whose key is gone; other threads may add some meanwhile."""
    for key in list(table):
        if is_gone(key):
            table.pop(key, None)
