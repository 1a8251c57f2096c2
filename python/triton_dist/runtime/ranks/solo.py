"""A group of one rank with the interface of larger groups, so that callers need no special case.

``RankGroup`` in ``_tuning/protocols.py`` describes the methods and their arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from triton_dist import knobs
from triton_dist.runtime.ranks.process import WorldRank

T = TypeVar("T")


class SoloRank:
    """This process alone. Gathers and broadcasts return this rank's own value."""

    process_group = None
    rank = 0
    size = 1
    is_leader = True

    def facts(self) -> Mapping[str, str]:
        return {"world_size": "1", "local_world_size": "1"}

    def global_rank(self, rank: int) -> int:
        in_world = dist.is_available() and dist.is_initialized()
        return WorldRank(dist.get_rank() if in_world else knobs.rank.get())

    def channel(self, function: str = "", key: str = "", call: int = 0, hint: str = "") -> SoloRank:
        return self

    def is_current(self) -> bool:
        return True

    def abort(self, reason: str, refused: bool = False) -> None:
        pass

    def note(self, function: str, text: str) -> None:
        pass

    def pending_values(self) -> tuple[dict[int, Any], dict[int, str]]:
        return {}, {}

    def first_all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        return [value]

    def broadcast(self, phase: str, value: T | None, seconds: float | None = None) -> T:
        return value  # type: ignore[return-value]  # the leader always passes a value

    def all_gather(self, phase: str, value: T, seconds: float | None = None) -> list[T]:
        return [value]

    def barrier(self, phase: str, seconds: float | None = None) -> None:
        pass

    def device_barrier(self) -> None:
        pass
