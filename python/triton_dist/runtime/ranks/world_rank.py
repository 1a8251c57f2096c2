"""A rank as every message names it: the rank of the world, and where that is."""

from __future__ import annotations


class WorldRank(int):
    """Rank of the world. As text it says its host and local rank too, where that says more:
    ``3 (host a, local rank 1)``."""

    where: str

    def __new__(cls, rank: int, where: str = "") -> WorldRank:
        self = super().__new__(cls, rank)
        self.where = where
        return self

    def __str__(self) -> str:
        return f"{int(self)} ({self.where})" if self.where else f"{int(self)}"

    def __reduce__(self) -> tuple[type[WorldRank], tuple[int, str]]:
        return WorldRank, (int(self), self.where)
