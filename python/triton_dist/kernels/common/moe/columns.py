"""Reduce-scatter in chunks of columns: each chunk is sent while the next chunk is computed.

The addend of a rank consists of one row block per destination rank. Inside a row block, the
elements of a chunk are contiguous, so one copy moves a chunk to its destination and another copy
moves its flag. After the last chunk, one kernel adds the received chunks in fp32 in the order of
ranks, and stores each element in its row and column of the result.

Calls alternate between two slots by the protocol of ``slots/epochs.py``. On each rank a slot has
``shards`` [source rank, shard_stride] of x's dtype and ``arrivals`` int64 [chunk, source rank].
Copy engines of the source rank write both regions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.buffer import padded_shard_numel
from triton_dist.kernels.common.exchange.protocol import after_wait
from triton_dist.kernels.common.exchange.pushed import Pushed, await_pushed
from triton_dist.kernels.common.peers import Disagreements, current_flag
from triton_dist.kernels.common.slots.epochs import PUSH_STREAMS, EpochSlots, PushedSlots
from triton_dist.runtime.device.transfer import Copy, InputRows, Step
from triton_dist.runtime.launch import Launch
from triton_dist.runtime.ranks import group_for

_BLOCK_ELEMENTS, _MAX_BLOCK_N = 2048, 1024
_PROGRAMS_PER_SM = 4


@dataclass(frozen=True)
class ColumnChunks:
    """Chunks of ``chunk_columns`` columns that cover N columns of a row block of ``rows`` rows. The
    last chunk may be narrower."""

    rows: int
    N: int
    chunk_columns: int

    def __len__(self) -> int:
        return int(triton.cdiv(self.N, self.chunk_columns))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield the first column and the end of each chunk."""
        for first_column in range(0, self.N, self.chunk_columns):
            yield first_column, min(first_column + self.chunk_columns, self.N)


def divide_columns(rows: int, N: int, num_chunks: int, divisor: int) -> ColumnChunks:
    """Divide N columns into at most ``num_chunks`` chunks whose width is divisible by
    ``divisor``."""
    return ColumnChunks(rows, N, int(triton.cdiv(triton.cdiv(N, num_chunks), divisor)) * divisor)


@jit(do_not_specialize=["rows", "call_tag", "rank"])
def kernel_add_columns(
    x_ptr,
    out_ptr,
    pushed,
    rows,
    N,
    chunk_columns,
    shard_stride,
    call_tag,
    rank,
    NUM_RANKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Store the sum of this rank's row block of x and the received row blocks in out [rows, N].

    Row blocks are added in the order of ranks. Any grid. A chunk has ``chunk_columns`` columns.
    ``shard_stride`` is the number of elements between the begins of two sources' row blocks.
    """
    current = current_flag(pushed.epoch, call_tag)
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    own_ptr = x_ptr + rank.to(tl.int64) * rows * N
    for chunk in range(tl.cdiv(N, chunk_columns)):
        first_column = chunk * chunk_columns
        columns = tl.minimum(chunk_columns, N - first_column)
        # Wait until this chunk has arrived from all peers.
        token = await_pushed(pushed, current, chunk, rank, NUM_RANKS)
        shards = pushed.shards + after_wait(tl.zeros((), tl.int64), token)
        for tile in range(
            tl.program_id(0), tiles_m * tl.cdiv(columns, BLOCK_SIZE_N), tl.num_programs(0)
        ):
            row = tile % tiles_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M)
            column = tile // tiles_m * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
            mask = (row < rows)[:, None] & (column < columns)[None, :]
            # Columns of a chunk are contiguous in the addends, but not in out.
            begin = rows.to(tl.int64) * first_column + row.to(tl.int64) * columns
            target = row.to(tl.int64) * N + first_column
            # Triton cannot know this alignment, and would not use 16-byte vectors.
            if ALIGNED:
                begin = tl.multiple_of(begin, 8)
                target = tl.multiple_of(target, 8)
            index = begin[:, None] + column[None, :]
            sums = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), tl.float32)
            for source in tl.static_range(NUM_RANKS):
                addend = shards + source * shard_stride.to(tl.int64)
                # Select a pointer instead of branching, so that all loads are in flight together.
                # The load bypasses L1, which may hold stale data.
                addend = tl.where(rank == source, own_ptr, addend)
                sums += tl.load(addend + index, mask=mask, cache_modifier=".cg").to(tl.float32)
            tl.store(
                out_ptr + target[:, None] + column[None, :],
                sums.to(out_ptr.dtype.element_ty),
                mask=mask,
            )


class PushedColumns(PushedSlots):
    """Slots for one row block of up to ``max_rows`` rows of ``N`` columns per source rank.

    A row block is sent in up to ``max_chunks`` chunks. Creation is collective.
    """

    def __init__(
        self,
        max_rows: int,
        N: int,
        dtype: torch.dtype,
        max_chunks: int,
        group: dist.ProcessGroup | None,
        name: str,
    ) -> None:
        num_ranks = group_for(group).size
        self._shard_stride = padded_shard_numel(max_rows * N) if num_ranks > 1 else 1
        regions = {
            "shards": ((num_ranks * self._shard_stride,), dtype),
            "arrivals": ((max_chunks * num_ranks,), torch.int64),
        }
        disagreements = Disagreements(f"the tokens of {name}", group)
        waiting_kernels = "the kernel that adds chunks of columns"
        slots = EpochSlots(
            name, regions, ("arrivals",), waiting_kernels, group, disagreements=disagreements
        )
        super().__init__(slots)

    def launch(
        self, columns: ColumnChunks, x: torch.Tensor, out: torch.Tensor, call_tag: int
    ) -> Launch:
        """Return the launch that sums the row blocks, as they arrive, into out [rows, N]."""
        slots, item_bytes = self.slots, x.element_size()
        pushed = Pushed(slots["shards"].local, slots["arrivals"].local, slots.epoch)
        block_n = min(_MAX_BLOCK_N, triton.next_power_of_2(columns.chunk_columns))
        block_m = _BLOCK_ELEMENTS // block_n
        num_tiles = triton.cdiv(columns.rows, block_m) * triton.cdiv(columns.chunk_columns, block_n)
        sizes = (
            columns.rows,
            columns.N,
            columns.chunk_columns,
            self._shard_stride,
            call_tag,
            self.rank,
        )
        # A vector holds 8 elements of 16 bits.
        aligned = item_bytes == 2 and columns.N % 8 == 0 and columns.chunk_columns % 8 == 0
        return Launch(
            kernel_add_columns,
            (min(num_tiles, _PROGRAMS_PER_SM * self._device.num_sms),),
            (x, out, pushed, *sizes),
            {
                "NUM_RANKS": self.num_ranks,
                "ALIGNED": aligned,
                "BLOCK_SIZE_M": block_m,
                "BLOCK_SIZE_N": block_n,
                "num_warps": 4,
            },
        )

    def run(
        self,
        columns: ColumnChunks,
        x: torch.Tensor,
        out: torch.Tensor,
        call_tag: int,
        compute: Callable[[int, int], None],
    ) -> None:
        """Store this rank's rows of the sum of x over ranks in out [rows, N].

        x has [num_ranks, rows, N] elements. ``compute(first_column, end)`` must queue the kernels
        that write columns ``first_column`` to ``end`` of x. ``call_tag`` must be equal on all
        ranks.
        """
        slots, has_awaited_peers, transfer = self.slots, False, None
        slots.take(call_tag, copies_flag_word=True)
        stream = self._device.current_stream()
        try:
            for chunk, (first_column, end) in enumerate(columns):
                compute(first_column, end)
                transfer = self.transfer(
                    (slots.index, columns, chunk), partial(self._push, columns, chunk)
                )
                transfer.start(x.view(-1, 1), stream)
            slots.launcher.run(
                (slots.index, columns, call_tag),
                lambda: self.launch(columns, x, out, call_tag),
                {"x_ptr": x, "out_ptr": out},
            )
            has_awaited_peers = True
        finally:
            # All transfers use the same streams, so it is sufficient to wait for the last transfer.
            if transfer is not None:
                transfer.join(stream)
            flags_of_peers = self.flags_of_peers(len(columns))
            slots.finish(has_awaited_peers, awaited_flags=lambda: {"arrivals": flags_of_peers})

    def _push(self, columns: ColumnChunks, chunk: int) -> Iterable[Step]:
        """Yield the copies that push a chunk of each peer's row block."""
        first_column, end = list(columns)[chunk]
        begin, end = columns.rows * first_column, columns.rows * end
        shard_begin, row_block_numel = self.rank * self._shard_stride, columns.rows * columns.N
        arrivals, flag = self.slots["arrivals"], chunk * self.num_ranks + self.rank
        for step in range(1, self.num_ranks):
            stream = (chunk * (self.num_ranks - 1) + step) % PUSH_STREAMS
            peer = (self.rank + step) % self.num_ranks
            target = self.slots["shards"].peers[peer][shard_begin + begin : shard_begin + end]
            source = InputRows(peer * row_block_numel + begin, peer * row_block_numel + end)
            yield Copy(stream, target.view(-1, 1), source)
            yield Copy(stream, arrivals.peers[peer][flag : flag + 1], self.slots.epoch[:1])
