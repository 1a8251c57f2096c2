"""Things that a walk has visited, each under a name of its own."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Visited:
    """Names by identity: an id means something only while its object lives, so objects are kept."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._namesakes: Counter[str] = Counter()
        self._alive: list[object] = []

    def name(self, item: object) -> str | None:
        """The name of what was visited; ``None``: it was not."""
        return self._names.get(id(item))

    def add(self, item: object, name: str) -> None:
        """Note a visit; several may have one name."""
        self._names[id(item)] = name
        self._alive.append(item)

    def leave(self, item: object) -> None:
        """Forget a visit: the next one is the first again."""
        del self._names[id(item)]

    def enter(self, item: Any) -> tuple[str, bool]:
        """Note a visit to a function or a class; returns its own name, and whether it was there
        before."""
        known = self.name(item)
        if known is not None:
            return known, True
        # A wrapper has the name of what it wraps; its code has its own.
        own = item.__code__.co_name if hasattr(item, "__wrapped__") else item.__qualname__
        base = own.rpartition("<locals>.")[2]
        self._namesakes[base] += 1
        count = self._namesakes[base]
        name = base if count == 1 else f"{base}#{count}"
        self.add(item, name)
        return name, False
