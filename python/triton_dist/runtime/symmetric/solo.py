"""Symmetric memory of one rank: plain memory."""

from __future__ import annotations

import torch

from triton_dist.runtime.symmetric.block import Layout, SymmetricMemory


class SoloSymmetricMemory(SymmetricMemory):
    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, 0, [torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)])

    def barrier(self) -> None:
        """One rank: always there."""
