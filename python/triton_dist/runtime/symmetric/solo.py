"""Symmetric memory of one rank: plain memory."""

from __future__ import annotations

import torch

from triton_dist.errors import SymmetricMemoryFull
from triton_dist.runtime.symmetric.block import Layout, SymmetricMemory


class SoloSymmetricMemory(SymmetricMemory):
    def __init__(self, layout: Layout, device: torch.device) -> None:
        try:
            block = torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as failure:  # torch.OutOfMemoryError is one
            available = 0
            if device.type == "cuda":
                available = torch.cuda.mem_get_info(device)[0]
            raise SymmetricMemoryFull(
                f"{layout.name} ({failure})", layout.nbytes, available, "Use a smaller context."
            ) from failure
        super().__init__(layout, 0, [block])

    def barrier(self) -> None:
        """One rank: always there."""
