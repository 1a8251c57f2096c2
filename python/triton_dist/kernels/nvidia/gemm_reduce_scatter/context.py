"""Context of GEMM-ReduceScatter, with its slots and the pushes of row blocks into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import triton

from triton_dist.errors import CaptureInProgress
from triton_dist.kernels.common.context import Check
from triton_dist.kernels.common.exchange.buffer import (
    ExchangeBuffer,
    padded_shard_numel,
    slot_bytes_for_shards,
)
from triton_dist.kernels.common.gemm.spaces import FEW_ROWS, MAX_SPLIT_K
from triton_dist.kernels.common.peers import Disagreements
from triton_dist.kernels.common.scatter.partials import (
    MAX_CHUNKS,
    Chunks,
    ContextLimits,
    ScatterMode,
    ScatterSlot,
    SummingContext,
    TileMemory,
    chunks_of_row_block,
    create,
    partial_sizes,
)
from triton_dist.kernels.common.slots.epochs import NUM_SLOTS, EpochSlots, SlotMemory
from triton_dist.runtime.device import current_device
from triton_dist.runtime.device.transfer import AwaitFlag, Copy, SetFlag, Step
from triton_dist.runtime.launch import BoundedDict
from triton_dist.runtime.ranks import Group

MAX_EXCHANGED_BYTES = 64 << 20
"""Maximum bytes of a product for ``"one_launch"`` and ``"serial"``. For larger products, other
algorithms are faster."""


class PartialsBuffer(SlotMemory):
    """Slots for row blocks of up to ``max_rows`` rows of ``N`` elements. Creation is collective.

    In addition to the regions of ``scatter/partials.py``, a slot has
        sums fp32 [slot_stride], if ``has_sums``: a sum to which the GEMMs of all ranks add.
        counters int32 [destination rank, MAX_CHUNKS]: numbers of staged tiles, counted by this
            rank's GEMM and reset by its copy engines.

    ``scatter/kernel.py`` describes the modes ``"tile"``, ``"row_block"`` and ``"add"``. In mode
    ``"row_block"`` the GEMM stores tiles in a local ``staging`` buffer [destination rank,
    slot_stride]. A copy engine pushes a chunk when its counter has reached its number of tiles.

    Args:
        has_sums: also allocate fp32 sums, for ``"add"``.
        stream: stream for pushes; default: a new stream.
    """

    def __init__(
        self,
        max_rows: int,
        N: int,
        dtype: torch.dtype,
        has_sums: bool,
        stream: Any,
        group: dist.ProcessGroup | None,
        name: str,
    ) -> None:
        self._device = current_device()
        num_ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self.slot_stride, tiles = partial_sizes(max_rows, N)
        regions = {
            "partials": ((num_ranks * self.slot_stride,), dtype),
            "arrivals": ((tiles * num_ranks,), torch.int64),
            "counters": ((num_ranks * MAX_CHUNKS,), torch.int32),
            "deferred": ((self._device.num_sms,), torch.int32),
        }
        zeroed: tuple[str, ...] = ("arrivals", "counters", "deferred")
        if has_sums:
            regions["sums"] = ((self.slot_stride,), torch.float32)
            zeroed += ("sums",)
        waiting_kernels = "the GEMM that sends tiles"
        disagreements = Disagreements(f"the rows of A in {name}", group)
        slots = EpochSlots(
            name, regions, zeroed, waiting_kernels, group, disagreements=disagreements
        )
        super().__init__(slots)
        self.has_sums, self._N, self._dtype = has_sums, N, dtype
        self._stream: Any = self._device.copy_stream(stream)
        self._staging: torch.Tensor | None = None
        # Created in advance, because tensors created in a graph capture are invalid outside of it.
        # Mode "row_block" is excluded, because it needs the staging buffer.
        modes: tuple[ScatterMode, ...] = ("tile", "add") if has_sums else ("tile",)
        self._tile_memories_by_mode = {mode: self._build_tile_memories(mode) for mode in modes}
        self._transfers: BoundedDict[Any, Any] = BoundedDict()

    def tile_memory(self, mode: ScatterMode) -> TileMemory:
        """Return the addresses to which a GEMM sends its tiles in the current slot.

        Raises:
            CaptureInProgress: the first call with ``"row_block"`` is captured.
        """
        tile_memories = self._tile_memories_by_mode.get(mode)
        if tile_memories is None:
            if self._device.is_capturing():
                raise CaptureInProgress(
                    "gemm_rs",
                    "the first call that pushes row blocks allocates memory, which must outlive "
                    "the graph. Make one such call before the capture.",
                )
            tile_memories = self._tile_memories_by_mode[mode] = self._build_tile_memories(mode)
        return tile_memories[self.slots.index]

    def push_transfer(self, rows: int, config: triton.Config, num_chunks: int) -> Any:
        """Return the transfer that pushes the staged row block of each peer, ``rows`` rows.

        The transfer pushes each chunk when all tiles of the chunk are staged, then sets the chunk's
        flag on the peer.
        """
        return self._cached(rows, config, num_chunks, self._build_push_transfer)

    def row_block_products(self, rows: int, config: triton.Config, num_chunks: int) -> Any:
        """Return (first row of A, memory for the product, push) of each product of a call.

        Row blocks of peers come first, in the order from rank + 1, in the chunks of
        ``push_transfer``. The last product is the row block of this rank, which is not pushed.
        """
        return self._cached(rows, config, num_chunks, self._build_row_block_products)

    def awaited_flags(self, num_flags: int) -> dict[str, list[int]]:
        """Return the indices of the flags that a call awaits; a row block has ``num_flags``."""
        return {"arrivals": self.flags_of_peers(num_flags)}

    def free(self) -> None:
        self._stream.close()
        self._tile_memories_by_mode.clear()
        self._transfers.clear()
        self._staging = None
        super().free()

    def _staging_buffer(self) -> torch.Tensor:
        """Return the staging buffer [num_ranks, slot_stride], allocated at the first push."""
        if self._staging is None:
            with torch.inference_mode(False):
                self._staging = torch.empty(
                    (self.num_ranks, self.slot_stride),
                    dtype=self._dtype,
                    device=self._device.torch_device,
                )
        return self._staging

    def _build_tile_memories(self, mode: ScatterMode) -> list[TileMemory]:
        return [self._slot_tile_memory(slot, mode) for slot in range(NUM_SLOTS)]

    def _slot_tile_memory(self, slot: int, mode: ScatterMode) -> TileMemory:
        partials, arrivals, deferred = (
            self.slots.region_of_slot(slot, name) for name in ("partials", "arrivals", "deferred")
        )
        own_partial = self.rank * self.slot_stride * partials.local.element_size()
        flags = arrivals.pointers
        if mode == "tile":
            targets = partials.pointers + own_partial
        elif mode == "add":
            partials = self.slots.region_of_slot(slot, "sums")
            targets = partials.pointers
        else:
            addresses = [staged.data_ptr() for staged in self._staging_buffer()]
            addresses[self.rank] = partials.local.data_ptr() + own_partial
            counters = self.slots.region_of_slot(slot, "counters").local
            targets = torch.tensor(addresses, dtype=torch.int64, device=counters.device)
            first_counters = [each.data_ptr() for each in counters.view(self.num_ranks, MAX_CHUNKS)]
            flags = torch.tensor(first_counters, dtype=torch.int64, device=counters.device)
        slot_argument = ScatterSlot(
            partials.local, self.slot_stride, targets, flags, arrivals.local,
            self.slots.control_words_of_slot(slot), deferred.local,
        )  # fmt: skip
        return TileMemory(mode, self.rank, self.num_ranks, slot_argument)

    def _cached(self, rows: int, config: triton.Config, num_chunks: int, make: Any) -> Any:
        """Return ``make(rows, chunks)`` for the current slot, cached per slot and arguments."""
        key = (make.__name__, self.slots.index, rows, id(config), num_chunks)
        cached = self._transfers.get(key)
        if cached is None:
            transfers = make(rows, chunks_of_row_block(config, rows, self._N, num_chunks))
            # Keep the config alive, because the key contains its id.
            cached = self._transfers[key] = transfers, config
        return cached[0]

    def _build_push_transfer(self, rows: int, chunks: Chunks) -> Any:
        return self._device.transfer(list(self._push_steps(chunks)), [self._stream])

    def _push_steps(self, chunks: Chunks) -> Iterable[Step]:
        counters = self.slots["counters"].local
        for step in range(1, self.num_ranks):
            peer = (self.rank + step) % self.num_ranks
            begin = 0
            for chunk, (rows, tiles) in enumerate(zip(chunks.rows, chunks.tiles, strict=True)):
                counter, end = peer * MAX_CHUNKS + chunk, begin + rows * self._N
                # Reset the counter, so that the next use of the slot can count again.
                yield AwaitFlag(0, counters, counter, tiles)
                yield SetFlag(0, counters, counter, 0)
                yield from self._chunk_push_steps(peer, chunk, begin, end)
                begin = end

    def _chunk_push_steps(self, peer: int, chunk: int, begin: int, end: int) -> Iterator[Step]:
        """Yield the copies of elements ``begin`` to ``end`` of a peer's row block and its flag."""
        target = self.slots["partials"].peers[peer][self.rank * self.slot_stride :]
        yield Copy(0, target[begin:end], self._staging_buffer()[peer][begin:end])
        flags, flag = self.slots["arrivals"].peers[peer], chunk * self.num_ranks + self.rank
        yield Copy(0, flags[flag : flag + 1], self.slots.epoch[:1])

    def _build_row_block_products(
        self, rows: int, chunks: Chunks
    ) -> list[tuple[int, torch.Tensor, Any]]:
        row_block_products: list[tuple[int, torch.Tensor, Any]] = []
        for step in range(1, self.num_ranks):
            peer = (self.rank + step) % self.num_ranks
            for chunk, first in enumerate(range(0, rows, chunks.rows[0])):
                begin, end = first * self._N, (first + chunks.rows[chunk]) * self._N
                memory = self._staging_buffer()[peer][begin:end].view(-1, self._N)
                push_steps = [*self._chunk_push_steps(peer, chunk, begin, end)]
                transfer = self._device.transfer(push_steps, [self._stream])
                row_block_products.append((peer * rows + first, memory, transfer))
        own = self.slots["partials"].local[self.rank * self.slot_stride :][: rows * self._N]
        return [*row_block_products, (self.rank * rows, own.view(rows, self._N), None)]


class GEMMReduceScatterTensorParallelContext(SummingContext[PartialsBuffer]):
    """Symmetric memory for ``gemm_rs`` with up to ``max_M`` rows of ``N`` columns.

    A context manager.

    Attributes:
        reduce_st: default of ``gemm_rs(reduce_st=…)``.
        exchange: memory of ``"one_launch"`` and ``"serial"``.
        max_exchange_M: maximum M of ``"one_launch"`` and ``"serial"``.
    """

    op_name, function, creator = "GEMM-ReduceScatter", "gemm_rs", "create_gemm_rs_context"

    def __init__(self, limits: ContextLimits, reduce_st: bool, rs_stream: Any) -> None:
        super().__init__(limits)
        max_M, N, output_dtype, _, group = limits
        self.reduce_st, num_ranks = reduce_st, self.num_ranks
        rows_per_rank = min(max_M, MAX_EXCHANGED_BYTES // (N * output_dtype.itemsize)) // num_ranks
        self.max_exchange_M = rows_per_rank * num_ranks if num_ranks > 1 else 0
        # Split tiles have MAX_SPLIT_K partials per rank, of up to FEW_ROWS rows in total.
        split_numel = MAX_SPLIT_K * padded_shard_numel(
            min(rows_per_rank, -(-FEW_ROWS // num_ranks)) * N
        )
        elements = max(1, rows_per_rank * N, split_numel)
        nbytes = slot_bytes_for_shards(elements, output_dtype, num_ranks)
        with self.allocating() as add:
            self.buffer = add(
                PartialsBuffer(
                    max_M // num_ranks, N, output_dtype, reduce_st, rs_stream, group, self.function
                )
            )
            disagreements, name = self.buffer.disagreements, "the exchange of gemm_rs"
            self.exchange = add(ExchangeBuffer(nbytes, group, name, disagreements=disagreements))

    @staticmethod
    def rows_check(argument: str, M: int, num_ranks: int) -> Check:
        fits = num_ranks <= M and M % num_ranks == 0
        return argument, M, fits, f"a positive multiple of world_size = {num_ranks}"

    @staticmethod
    def round_down_rows(M: int, num_ranks: int) -> int:
        return M // num_ranks * num_ranks

    def rows_of_rank(self, M: int) -> int:
        return M // self.num_ranks


def create_gemm_rs_context(
    max_M: int,
    N: int,
    rank: int,
    world_size: int,
    local_world_size: int,
    output_dtype: torch.dtype,
    rs_stream: torch.cuda.Stream | None = None,
    reduce_st: bool = False,
    *,
    tp_group: Group = None,
) -> GEMMReduceScatterTensorParallelContext:
    """Create the context of ``gemm_rs``. Collective over ``tp_group``.

    Allocates per rank about 2 * ``max_M`` * N elements. Products that one launch exchanges need
    another 2 * ``max_M`` * N elements (at most 128 MB), and at least the 2 * 8 * min(``max_M``, 64)
    * N elements of split tiles. The first call of ``"copy_engine"`` allocates another ``max_M`` * N
    elements.

    Args:
        max_M: maximum number of rows of A, a multiple of ``world_size``.
        N: number of columns of B.
        rank, world_size, local_world_size: this rank in the group, and the numbers of ranks of the
            group and of one host.
        output_dtype: dtype of the output, and of A and B unless they are fp8: fp16, bf16 or fp32.
        rs_stream: stream of the copy-engine pushes; default: a high-priority stream of the context.
        reduce_st: allocate fp32 sums, which ``gemm_rs(…, reduce_st=True)`` requires, and make
            ``True`` the default of ``gemm_rs``. Each tile is then added to the owner's sum, instead
            of storing one addend per rank. This takes less memory traffic at the end of a call. For
            16-bit dtypes it sends twice the bytes between GPUs. The result is not deterministic.
        tp_group: process group; default: the world, or this process alone.

    Returns:
        The context. Call ``finalize()`` or use ``with`` to free it.

    Raises:
        InvalidArgument, RankDisagreement, SymmetricMemoryFull: see ``create_ag_gemm_context``.
    """
    return create(
        GEMMReduceScatterTensorParallelContext, max_M, N, rank, world_size, local_world_size,
        output_dtype, tp_group, {"reduce_st": bool(reduce_st)}, rs_stream=rs_stream,
    )  # fmt: skip
