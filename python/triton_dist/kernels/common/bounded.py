"""A cache that a service with very many shapes cannot fill without end."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict that is emptied before it has more than ``most`` entries: what comes then is made
    again. Entries here take a few KB each."""

    most = 4096

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.most and key not in self:
            self.clear()
        super().__setitem__(key, value)
