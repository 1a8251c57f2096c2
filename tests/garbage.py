"""Garbage whose end waits for the GPU, as torch's symmetric memory does."""

from __future__ import annotations

import torch


class Synchronizing:
    """An object in a cycle whose end waits for all that the GPU has to do."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        torch.cuda.synchronize()


def leave() -> int:
    """Leave such an object, then allocate so much that a collection starts, if there are any."""
    Synchronizing()
    return len([[each] for each in range(100_000)])
