"""Slots of a GEMM-AllReduce.

In addition to the regions of ``partials.py``, a slot has ``sums`` [max_M * N] of the output's dtype
and their flags ``sum_arrivals`` int64 [tile, owner]. Both are written by the owner of each row
block.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common.peers import Disagreements
from triton_dist.kernels.common.scatter.partials import (
    Scattering,
    Slot,
    row_block_rows,
    slot_sizes,
)
from triton_dist.kernels.common.slots.epochs import SLOTS, EpochSlots, SlotMemory
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for


class ReducedPartials(SlotMemory):
    """Slots for products of up to ``max_M`` rows of ``N`` columns. Creation is collective."""

    def __init__(
        self, max_M: int, N: int, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str
    ) -> None:
        num_ranks = group_for(group).size
        self.slot_stride, tiles = slot_sizes(row_block_rows(max_M, num_ranks), N)
        regions = {
            "partials": ((num_ranks * self.slot_stride,), dtype),
            "sums": ((max_M * N,), dtype),
            "arrivals": ((tiles * num_ranks,), torch.int64),
            "sum_arrivals": ((tiles * num_ranks,), torch.int64),
            "deferred": ((current_device().num_sms,), torch.int32),
        }
        if num_ranks == 1:  # a plain product needs no regions
            regions = {region: ((1,), dtype) for region, (_, dtype) in regions.items()}
        flags = ("arrivals", "sum_arrivals", "deferred")
        kernels = "the GEMM that adds over ranks"
        disagreements = Disagreements(f"the rows of A in {name}", group)
        slots = EpochSlots(name, regions, flags, kernels, group, disagreements=disagreements)
        super().__init__(slots)
        self._N = N
        # Created in advance: tensors made in a capture are invalid outside of its graph.
        self._scatterings = [self._scattering(slot) for slot in range(SLOTS)]

    def describe(self) -> Scattering:
        """Return the targets of the tiles of a GEMM in the current slot."""
        return self._scatterings[self.slots.index]

    def sums(self, M: int) -> torch.Tensor:
        """Return [M, N] of the current slot, to which owners send sums."""
        return self.slots["sums"].local[: M * self._N].view(M, self._N)

    def spare_sums(self, M: int) -> torch.Tensor:
        """Return [M, N] of the next slot, for a call without a slot.

        The current slot must keep the result of the last call.
        """
        sums = self.slots.of_slot(self.slots.next_index, "sums").local
        return sums[: M * self._N].view(M, self._N)

    def expected(self, tiles: int) -> dict[str, list[int]]:
        """Return the flags that a call with ``tiles`` tiles per row block waits for."""
        of_peers = self.flags_of_peers(tiles)
        return {"arrivals": of_peers, "sum_arrivals": of_peers}

    def free(self) -> None:
        self._scatterings.clear()
        super().free()

    def _scattering(self, slot: int) -> Scattering:
        partials, arrivals, sums, sum_arrivals = (
            self.slots.of_slot(slot, name)
            for name in ("partials", "arrivals", "sums", "sum_arrivals")
        )
        own_partial = self.rank * self.slot_stride * partials.local.element_size()
        memory = Slot(
            partials.local, self.slot_stride, partials.pointers + own_partial, arrivals.pointers,
            arrivals.local, self.slots.epoch_of(slot), self.slots.of_slot(slot, "deferred").local,
        )  # fmt: skip
        return Scattering(
            "all", self.rank, self.num_ranks, memory, sums.pointers, sum_arrivals.pointers
        )
