"""Symmetric memory of a GEMM-AllReduce: slots that hold partial sums of a product from every rank,
sums that their owners send, and the flags that say which tiles of them are there.

A slot has, on each rank, of the output's dtype where nothing else is said:
    partials [source rank, slot_stride], partial sums of this rank's row block [rows, N], and
        arrivals int64 [tile, source rank], their flags: written by the source's GEMM.
    sums [max_M * N], like the output, and sum_arrivals int64 [tile, owner], their flags: by each
        row block's owner.
    left int32 [SMs], deferred tiles: by this rank's kernels.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from triton_dist.kernels.common.disagreement import Disagreements
from triton_dist.kernels.common.scatter.launch import Scattering, slab_rows
from triton_dist.kernels.common.scatter.partials import room_for
from triton_dist.kernels.common.slots.epochs import SLOTS, EpochSlots
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for


class ReducedPartials:
    """Slots for products of up to ``max_M`` rows of ``N`` columns. Creation is collective."""

    def __init__(
        self, max_M: int, N: int, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str
    ) -> None:
        size = group_for(group).size
        rows = slab_rows(max_M, size)
        self.slot_stride, tiles = room_for(rows, N)
        regions = {
            "partials": ((size * self.slot_stride,), dtype),
            "sums": ((max_M * N,), dtype),
            "arrivals": ((tiles * size,), torch.int64),
            "sum_arrivals": ((tiles * size,), torch.int64),
            "left": ((current_device().num_sms,), torch.int32),
        }
        if size == 1:  # a plain product needs none of it
            regions = {region: ((1,), dtype) for region, (_, dtype) in regions.items()}
        flags = ("arrivals", "sum_arrivals", "left")
        kernels = "the GEMM that adds over ranks"
        found = Disagreements(f"the rows of A in {name}", group)
        self.slots = EpochSlots(name, regions, flags, kernels, group, found=found)
        self.rank, self.num_ranks = self.slots.rank, self.slots.num_ranks
        self.disagreements = self.slots.disagreements
        self._N = N
        # Beforehand: what is made in a capture is no good outside of its graph.
        self._scatterings = [self._scattering(slot) for slot in range(SLOTS)]

    def describe(self) -> Scattering:
        """Targets of the tiles of a GEMM in the current slot."""
        return self._scatterings[self.slots.index]

    def sums(self, M: int) -> torch.Tensor:
        """[M, N] of the current slot, to which owners send what they added."""
        return self.slots["sums"].local[: M * self._N].view(M, self._N)

    def expected(self, tiles: int) -> dict[str, list[int]]:
        """The flags that a call with so many tiles of a row block waits for."""
        indices = range(tiles * self.num_ranks)
        of_peers = [index for index in indices if index % self.num_ranks != self.rank]
        return {"arrivals": of_peers, "sum_arrivals": of_peers}

    def reset(self) -> None:
        """Bring all ranks back to the same state after a call that failed on some rank.
        Collective."""
        self.slots.reset()

    def free(self) -> None:
        """Free the memory; idempotent. Every rank must have finished its calls."""
        self._scatterings.clear()
        self.slots.free()

    def _scattering(self, slot: int) -> Scattering:
        partials, arrivals, sums, sum_arrivals = (
            self.slots.of_slot(slot, name)
            for name in ("partials", "arrivals", "sums", "sum_arrivals")
        )
        own_part = self.rank * self.slot_stride * partials.local.element_size()
        return Scattering(
            "all", self.rank, self.num_ranks, partials.local, self.slot_stride,
            partials.pointers + own_part, arrivals.pointers, arrivals.local,
            self.slots.epoch_of(slot), self.slots.of_slot(slot, "left").local, sums.pointers,
            sum_arrivals.pointers,
        )  # fmt: skip
