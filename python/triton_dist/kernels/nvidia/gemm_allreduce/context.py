"""Context of GEMM-AllReduce with its symmetric memory, and its algorithms as an enum."""

from __future__ import annotations

import enum

import torch
import torch.distributed as dist

from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.sums import MAX_ONE_SHOT_BYTES, MAX_PACKET_BYTES, SumBuffer
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.kernels.common.scatter.packets import packet_bytes_of_row
from triton_dist.kernels.common.scatter.partials import (
    ContextLimits,
    ScatterSlot,
    SummingContext,
    TileMemory,
    create,
    partial_sizes,
    row_block_rows,
)
from triton_dist.kernels.common.slots.epochs import NUM_SLOTS, EpochSlots, SlotMemory
from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import Group, group_for

MAX_SUMMED_BYTES = 32 << 20
"""Maximum bytes of a product that one launch sums in two shots. ``"serial"`` sums larger products
in several launches."""


class GEMMAllReduceMethod(enum.Enum):
    """Algorithm that sums the products over the ranks."""

    ONE_SHOT = "one_shot"
    """Each tile is sent to all ranks, and every rank adds all tiles. For products of up to 4 MB."""
    TWO_SHOT = "two_shot"
    """Each tile is sent to the owner of its rows, which adds it and sends the sum to all ranks."""
    SERIAL = "serial"
    """``torch.matmul``, then our all-reduce."""
    COLLECTIVE = "collective"
    """``torch.matmul``, then ``torch.distributed.all_reduce`` (NCCL; gloo on CPU ranks)."""

    __repr__ = enum.Enum.__str__


class AllReduceSlots(SlotMemory):
    """Slots for products of up to ``max_M`` rows of ``N`` columns. Creation is collective.

    In addition to the regions of ``scatter/partials.py``, a slot has ``sums`` [max_M * N] of the
    output's dtype and the flags of the sums, ``sum_arrivals`` int64 [tile, owner]. The owner of
    each row block writes both on all ranks.
    """

    def __init__(
        self, max_M: int, N: int, dtype: torch.dtype, group: dist.ProcessGroup | None, name: str
    ) -> None:
        num_ranks = group_for(group).size
        self.slot_stride, tiles = partial_sizes(row_block_rows(max_M, num_ranks), N)
        regions = {
            "partials": ((num_ranks * self.slot_stride,), dtype),
            "sums": ((max_M * N,), dtype),
            "arrivals": ((tiles * num_ranks,), torch.int64),
            "sum_arrivals": ((tiles * num_ranks,), torch.int64),
            "deferred": ((current_device().num_sms,), torch.int32),
        }
        if num_ranks == 1:  # nothing is sent: allocate one element per region
            regions = {region: ((1,), dtype) for region, (_, dtype) in regions.items()}
        flags = ("arrivals", "sum_arrivals", "deferred")
        waiting_kernels = "the GEMM that adds over ranks"
        disagreements = Disagreements(f"the rows of A in {name}", group)
        slots = EpochSlots(
            name, regions, flags, waiting_kernels, group, disagreements=disagreements
        )
        super().__init__(slots)
        self._N = N
        # Created in advance, because tensors created in a graph capture are invalid outside of it.
        self._tile_memories = [self._slot_tile_memory(slot) for slot in range(NUM_SLOTS)]

    def tile_memory(self) -> TileMemory:
        """Return the addresses to which a GEMM sends its tiles in the current slot."""
        return self._tile_memories[self.slots.index]

    def sums(self, M: int) -> torch.Tensor:
        """Return the memory [M, N] of the current slot to which owners send sums."""
        return self.slots["sums"].local[: M * self._N].view(M, self._N)

    def sums_of_next_slot(self, M: int) -> torch.Tensor:
        """Return the memory [M, N] for sums in the next slot.

        A call that does not switch slots uses it, because the current slot may hold the result of
        the last call.
        """
        sums = self.slots.region_of_slot(self.slots.next_index, "sums").local
        return sums[: M * self._N].view(M, self._N)

    def awaited_flags(self, tiles: int) -> dict[str, list[int]]:
        """Return the indices of the flags that a call with ``tiles`` tiles per row block awaits."""
        indices = self.flags_of_peers(tiles)
        return {"arrivals": indices, "sum_arrivals": indices}

    def free(self) -> None:
        self._tile_memories.clear()
        super().free()

    def _slot_tile_memory(self, slot: int) -> TileMemory:
        partials, arrivals, sums, sum_arrivals, deferred = (
            self.slots.region_of_slot(slot, name)
            for name in ("partials", "arrivals", "sums", "sum_arrivals", "deferred")
        )
        own_partial = self.rank * self.slot_stride * partials.local.element_size()
        memory = ScatterSlot(
            partials.local, self.slot_stride, partials.pointers + own_partial, arrivals.pointers,
            arrivals.local, self.slots.control_words_of_slot(slot), deferred.local,
        )  # fmt: skip
        return TileMemory(
            "all", self.rank, self.num_ranks, memory, sums.pointers, sum_arrivals.pointers
        )


class GEMMAllReduceTensorParallelContext(SummingContext[AllReduceSlots]):
    """Symmetric memory for ``gemm_ar`` with up to ``max_M`` rows of ``N`` columns.

    A context manager.

    Attributes:
        max_one_shot_M: maximum M of ``"one_shot"``.
        max_packet_M: maximum M of ``"one_shot_in_packets"``.
        max_exchange_M: maximum M of ``"two_shot_in_one_launch"``.
        exchange: memory of the algorithms that sum in one launch, and of ``"serial"``.
    """

    op_name, function, creator = "GEMM-AllReduce", "gemm_ar", "create_gemm_ar_context"

    def __init__(self, limits: ContextLimits) -> None:
        super().__init__(limits)
        max_M, N, output_dtype, _, group = limits
        row_bytes = N * output_dtype.itemsize
        packet_row_bytes = packet_bytes_of_row(N, output_dtype.itemsize)
        self.max_one_shot_M = min(max_M, MAX_ONE_SHOT_BYTES // row_bytes)
        self.max_packet_M = min(max_M, MAX_PACKET_BYTES // packet_row_bytes)
        rows = -(-max_M // self.num_ranks)  # rows that one rank owns
        rows = min(rows, max(1, MAX_SUMMED_BYTES // row_bytes // self.num_ranks))
        self.max_exchange_M = min(max_M, rows * self.num_ranks)
        nbytes = rows * self.num_ranks * packet_row_bytes if self.num_ranks > 1 else 1
        with self.allocating() as add:
            self.buffer = add(AllReduceSlots(max_M, N, output_dtype, group, self.function))
            disagreements = self.buffer.disagreements
            self.exchange = add(SumBuffer(nbytes, group, "the exchange of gemm_ar", disagreements))

    @staticmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        return argument, M, M >= 1, "at least 1"

    def rows_of_rank(self, M: int) -> int:
        return row_block_rows(M, self.num_ranks)


def create_gemm_ar_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    *,
    tp_group: Group = None,
) -> GEMMAllReduceTensorParallelContext:
    """Create the context of ``gemm_ar``. Collective over ``tp_group``.

    Allocates per rank about 4 * ``max_M`` * N elements, plus memory for sums in one launch and for
    packets. Let P be the bytes of ``max_M`` * N elements. Sums in one launch need the larger of
    4 * min(P, 32 MB) and 2 * ``world_size`` * min(P, 4 MB). Packets need
    4 * ``world_size`` * min(P, 256 KB); with three or more ranks at least 8 * min(P, 2 MB).

    Args:
        max_M: maximum number of rows of A.
        N: number of columns of B.
        rank, world_size, local_world_size: this rank in the group, and the numbers of ranks of the
            group and of one host.
        output_dtype: dtype of the output, and of A and B unless they are fp8: fp16, bf16 or fp32.
        tp_group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return create(
        GEMMAllReduceTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group,
    )  # fmt: skip
