"""GEMM-ReduceScatter: the scattered GEMM, and the sum of row blocks that copy engines push.

``scatter/kernel.py`` describes the algorithm and the arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.algorithms import ScatteredLaunches
from triton_dist.kernels.common.scatter.kernel import make_target_descriptors, store_to_owner
from triton_dist.kernels.common.scatter.partials import TileMemory, tiles_of_row_block
from triton_dist.kernels.common.scatter.tiles import (
    MAY_WAIT,
    add_deferred_tiles,
    add_own_tile,
    announce_tile,
    await_partials,
    count_begun_program,
    decide_whether_to_wait,
    make_operands,
    multiply_operands,
    store_tile_by_pointers,
    tile_in_scatter_order,
)
from triton_dist.runtime.launch import Launch


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_persistent(
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

    Descriptors use TMA from sm_90 on. A single loop processes the tiles of all row blocks. With a
    loop per row block, Triton would wait for the TMA stores between loops, and each row block would
    end with a partial wave. ``ANNOUNCE_LATER``: a tile is announced after its program has
    multiplied the next tile. The TMA store of the tile, which takes 10 us or more over NVLink, is
    then already complete, so no thread waits for it.
    """
    NUM_RANKS: tl.constexpr = summing.NUM_RANKS
    decision = MAY_WAIT  # or MUST_DEFER; 0 before the first check
    if NUM_RANKS > 1:
        count_begun_program(slot.epoch)
        decision = 0
    tiles_m, tiles_n = tl.cdiv(rows, tile.M), tl.cdiv(N, tile.N)
    a_desc, b_desc = make_operands(a_ptr, b_ptr, M, N, K, stride_b, stride_b, True, tile)
    target_descs = tl.tuple([])
    if summing.SCATTER_MODE != "add":
        target_descs = make_target_descriptors(slot, rows, N, tile, NUM_RANKS)
    # The tile to announce next. ``rank``: none, because a tile of this rank is not announced.
    stored_row_block, stored_work_item = rank, 0
    awaited_work_item = -1
    for index in range(tl.program_id(0), NUM_RANKS * tiles_m * tiles_n, NUM_SMS):
        row_block, tile_number, m, n = tile_in_scatter_order(
            index, rank, NUM_RANKS, tiles_m, tiles_n, tiles_m, tile.GROUP_M
        )
        work_item = m // chunk_tiles_m if summing.SCATTER_MODE == "row_block" else tile_number
        row, column = m * tile.M, n * tile.N
        accumulator = multiply_operands(
            a_desc, b_desc, row_block * rows + row, column, M, N, K, None, scales, True, tile
        )
        if summing.ANNOUNCE_LATER:  # noqa: SIM102  # constexpr and runtime conditions stay apart
            if stored_row_block != rank:
                dl.publish_tile()
                announce_tile(slot, M, stored_row_block, stored_work_item, rank, summing)
                stored_row_block = rank
        if summing.SCATTER_MODE == "add":
            store_tile_by_pointers(
                target_at(slot.targets, row_block, slot.partials), accumulator, row, column, rows,
                N, True, tile.M, tile.N, tile.INT64_OFFSETS,
            )  # fmt: skip
        else:
            store_to_owner(target_descs, row_block, accumulator, row, column, tile, NUM_RANKS)
            if not summing.ANNOUNCE_LATER:
                dl.publish_tile()
        if row_block != rank:
            if summing.ANNOUNCE_LATER:
                stored_row_block, stored_work_item = row_block, work_item
            else:
                announce_tile(slot, M, row_block, work_item, rank, summing)
        else:
            if summing.ANNOUNCE_LATER:
                # Make the TMA store visible to the other threads of this program.
                dl.publish_tile()
            if decision == 0:
                decision = decide_whether_to_wait(slot.epoch, slot.deferred)
            if decision == MAY_WAIT:
                token = 0
                if work_item != awaited_work_item:  # Tiles of a chunk arrive together.
                    token = await_partials(slot, M, work_item, rank, NUM_RANKS)
                    awaited_work_item = work_item
                add_own_tile(slot, out, row, column, rows, rows, N, token, rank, tile, summing)
    if summing.ANNOUNCE_LATER:  # noqa: SIM102  # constexpr and runtime conditions stay apart
        if stored_row_block != rank:  # The last tile of this program was for another rank.
            dl.publish_tile()
            announce_tile(slot, M, stored_row_block, stored_work_item, rank, summing)


class ReduceScatterLaunches(ScatteredLaunches):
    """Launches that send tiles to the ranks that own their rows. The owners add the tiles."""

    kernel = kernel_gemm_scatter_persistent


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_add_row_block(
    slot, out, N, M, rows, chunk_tiles_m, rank, tile: tl.constexpr, summing: tl.constexpr
):
    """Sum a tile of this rank's row block when its chunk has arrived from every peer.

    Grid (tiles of a row block,).
    """
    m, n = tl.program_id(0) // tl.cdiv(N, tile.N), tl.program_id(0) % tl.cdiv(N, tile.N)
    token = await_partials(slot, M, m // chunk_tiles_m, rank, summing.NUM_RANKS)
    add_own_tile(slot, out, m * tile.M, n * tile.N, rows, rows, N, token, rank, tile, summing)


def add_row_block(
    C: torch.Tensor, bias: torch.Tensor | None, config: triton.Config,
    tile_memory: TileMemory, M: int, num_chunks: int,
) -> Launch:  # fmt: skip
    """Return the launch that waits for this rank's row block from every peer, and sums it in C."""
    launch = add_deferred_tiles(C, bias, config, tile_memory, M=M, num_sms=1, num_chunks=num_chunks)
    del launch.options["NUM_SMS"]
    grid = (tiles_of_row_block(config, *C.shape),)
    return Launch(kernel_add_row_block, grid, launch.args, launch.options)
