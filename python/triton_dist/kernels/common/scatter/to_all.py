"""GEMM-AllReduce: the scattered GEMM, and the kernel that copies the received sums to C.

``scatter/kernel.py`` describes the algorithm and the arguments. The copy is a separate launch. As
part of the GEMM it could not begin earlier, because every program multiplies until the end. It
would also be slower: one program per SM copies at half the speed of several programs per SM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import current_flag, timeout_words_at
from triton_dist.kernels.common.scatter.algorithms import ScatteredLaunches
from triton_dist.kernels.common.scatter.kernel import make_target_descriptors, store_to_owner
from triton_dist.kernels.common.scatter.partials import (
    TileMemory,
    chunks_of_row_block,
    row_block_rows,
    tiles_of_row_block,
)
from triton_dist.kernels.common.scatter.tiles import (
    MAY_WAIT,
    add_own_tile,
    announce_tile,
    announce_to_all,
    await_partials,
    count_begun_program,
    decide_whether_to_wait,
    make_operands,
    multiply_operands,
    tile_in_scatter_order,
)
from triton_dist.runtime.launch import Launch

# Number of elements that a program copies at a time: with 2-byte elements and 8 warps, 64 bytes per
# thread.
_COPY_ELEMENTS = 8192


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_all_reduce_persistent(
    a_ptr,
    b_ptr,
    stride_b,
    slot,
    out,
    scales,
    N,
    K,
    M,
    rows,
    chunk_tiles_m,
    rank,
    NUM_SMS: tl.constexpr,
    tile: tl.constexpr,
    summing: tl.constexpr,
):
    """Multiply and send tiles through tensor descriptors. Grid (min(NUM_SMS, tiles),).

    Descriptors use TMA from sm_90 on. Sums of a chunk are sent while the next chunks are
    multiplied. A tile for another rank is announced after its program has multiplied the next tile,
    as in a reduce-scatter. A tile of this rank's row block is added after the next tile has been
    stored, and its sum is announced one tile later. Without this delay the program would wait,
    because peers announce their partials of this tile at about the same time.
    """
    NUM_RANKS: tl.constexpr = summing.NUM_RANKS
    decision = MAY_WAIT  # or MUST_DEFER; 0 before the first check
    if NUM_RANKS > 1:
        count_begun_program(slot.epoch)
        decision = 0
    tiles_m, tiles_n = tl.cdiv(rows, tile.M), tl.cdiv(N, tile.N)
    a_desc, b_desc = make_operands(a_ptr, b_ptr, M, N, K, stride_b, stride_b, True, tile)
    target_descs = make_target_descriptors(slot, rows, N, tile, NUM_RANKS)
    own_rows = min(rows, M - rank * rows)
    # The tile to announce next. The value ``rank`` means no tile: own tiles are not announced here.
    row_block_to_announce, tile_to_announce = rank, 0
    # A tile of this rank that is to be added, and a tile whose sum is to be announced; -1: none.
    tile_to_add, own_row, own_column, sum_to_announce = -1, 0, 0, -1
    for index in range(tl.program_id(0), NUM_RANKS * tiles_m * tiles_n, NUM_SMS):
        row_block, tile_number, m, n = tile_in_scatter_order(
            index, rank, NUM_RANKS, tiles_m, tiles_n, chunk_tiles_m, tile.GROUP_M
        )
        row, column = m * tile.M, n * tile.N
        accumulator = multiply_operands(
            a_desc, b_desc, row_block * rows + row, column, M, N, K, None, scales, True, tile
        )
        if row_block_to_announce != rank:
            dl.publish_tile()
            announce_tile(slot, M, row_block_to_announce, tile_to_announce, rank, summing)
            row_block_to_announce = rank
        if sum_to_announce >= 0:
            announce_to_all(out, slot, M, sum_to_announce, rank, NUM_RANKS)
            sum_to_announce = -1
        store_to_owner(target_descs, row_block, accumulator, row, column, tile, NUM_RANKS)
        if row_block != rank:
            row_block_to_announce, tile_to_announce = row_block, tile_number
        else:
            dl.publish_tile()  # Make the TMA store visible to the other threads of this program.
            if decision == 0:
                decision = decide_whether_to_wait(slot.epoch, slot.deferred)
        if tile_to_add >= 0:
            token = await_partials(slot, M, tile_to_add, rank, NUM_RANKS)
            add_own_tile(
                slot, out, own_row, own_column, rows, own_rows, N, token, rank, tile, summing
            )
            sum_to_announce, tile_to_add = tile_to_add, -1
        if (row_block == rank) & (decision == MAY_WAIT):
            tile_to_add, own_row, own_column = tile_number, row, column
    if row_block_to_announce != rank:  # The last tile of this program was for another rank.
        dl.publish_tile()
        announce_tile(slot, M, row_block_to_announce, tile_to_announce, rank, summing)
    if sum_to_announce >= 0:
        announce_to_all(out, slot, M, sum_to_announce, rank, NUM_RANKS)
    if tile_to_add >= 0:
        token = await_partials(slot, M, tile_to_add, rank, NUM_RANKS)
        add_own_tile(slot, out, own_row, own_column, rows, own_rows, N, token, rank, tile, summing)
        announce_to_all(out, slot, M, tile_to_add, rank, NUM_RANKS)


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_copy_sums(
    c_ptr,
    sums_ptr,
    arrivals_ptr,
    epoch_ptr,
    M,
    rows,
    N,
    chunk_tiles_m,
    rank,
    NUM_RANKS: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    COPY_ROWS: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Wait for the sum of a tile and, with ``COPY``, copy it from ``sums_ptr`` [M, N] to C [M, N].

    Each program has one tile, in the order of the GEMM. Grid (tiles of all row blocks,). Programs
    of this rank's row block have no work.
    """
    row_block, tile, m, n = tile_in_scatter_order(
        tl.program_id(0), rank, NUM_RANKS, tl.cdiv(rows, BLOCK_SIZE_M), tl.cdiv(N, BLOCK_SIZE_N),
        chunk_tiles_m, GROUP_SIZE_M,
    )  # fmt: skip
    if row_block != rank:
        flag_ptr = arrivals_ptr + tile * NUM_RANKS + row_block
        token = dl.wait(flag_ptr, 1, current_flag(epoch_ptr, M), timeout_words_at(epoch_ptr), True)
        if COPY:
            end = min((row_block + 1) * rows, M)
            column = n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
            local_row = tl.arange(0, COPY_ROWS)
            for first in range(0, BLOCK_SIZE_M, COPY_ROWS):
                row = dl.consume_token(row_block * rows + m * BLOCK_SIZE_M + first, token)
                mask = (local_row < end - row)[:, None] & (column < N)[None, :]
                begin = row.to(tl.int64) * N
                inside = local_row[:, None] * N + column[None, :]
                if INT64_OFFSETS:
                    inside = local_row[:, None].to(tl.int64) * N + column[None, :]
                # The load bypasses L1, which may hold stale data.
                block = tl.load(
                    sums_ptr + begin + inside, mask=mask, other=0.0, cache_modifier=".cg"
                )
                tl.store(c_ptr + begin + inside, block, mask=mask)


def copy_sums(
    C: torch.Tensor,
    sums: torch.Tensor,
    arrivals: torch.Tensor,
    config: triton.Config,
    tile_memory: TileMemory,
    *,
    num_chunks: int,
    copy: bool,
) -> Launch:
    """Return the launch that copies the sums of peers to C [M, N] as they arrive.

    Args:
        sums: [M, N], memory to which peers send sums.
        arrivals: int64 [tile, rank], flags of the sums.
        copy: ``False`` if C is ``sums``; the launch then only waits for all sums.
    """
    M, N = C.shape
    rows = row_block_rows(M, tile_memory.num_ranks)
    chunks = chunks_of_row_block(config, rows, N, num_chunks)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    options = {
        "NUM_RANKS": tile_memory.num_ranks,
        "COPY": copy,
        "BLOCK_SIZE_M": block_m,
        "BLOCK_SIZE_N": block_n,
        "GROUP_SIZE_M": chunks.group_size_m,
        "COPY_ROWS": max(1, min(block_m, _COPY_ELEMENTS // block_n)),
        "INT64_OFFSETS": block_m * N >= 2**31,
        "num_warps": 8,
    }
    return Launch(
        kernel_copy_sums,
        (tile_memory.num_ranks * tiles_of_row_block(config, rows, N),),
        (C, sums, arrivals, tile_memory.slot.epoch, M, rows, N, chunks.tiles_m, tile_memory.rank),
        options,
    )


@dataclass  # Not frozen, because that would take 1 us more per call.
class TwoShotLaunches(ScatteredLaunches):
    """Launches that send tiles to the owners of their rows, which send the sums to all ranks.

    ``sums`` [M, N] receives the sums, and ``arrivals`` their flags. C may be ``sums``.
    """

    kernel = kernel_gemm_all_reduce_persistent
    sums: torch.Tensor
    arrivals: torch.Tensor

    def run(self) -> None:
        super().run()
        self._launch(("copy", *self.key), self._copy_launch, {"c_ptr": self.C})

    def _key(self) -> tuple[object, ...]:
        return *super()._key(), self._copies_sums()

    def _copies_sums(self) -> bool:
        return self.C is not self.sums

    def _later_launches(self) -> Iterator[Launch]:
        yield from super()._later_launches()
        yield self._copy_launch()

    def _copy_launch(self) -> Launch:
        return copy_sums(
            self.C, self.sums, self.arrivals, self.call.gemm_config, self.tile_memory,
            num_chunks=self.call.num_chunks, copy=self._copies_sums(),
        )  # fmt: skip
