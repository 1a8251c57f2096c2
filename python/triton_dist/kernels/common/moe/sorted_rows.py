"""Tiles and copies of rows that are sorted by expert. A position is an index in this order.

The ends of the experts' rows are in device memory. The host does not read them, so a captured graph
serves any routing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.moe.routing import (
    TILE_RECORD_WORDS,
    BlockMap,
    max_tiles,
    store_records,
)
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import Launch

_TILES_PER_STEP = 128
"""Number of tiles whose records a program writes at a time."""


def tiles_of_positions(positions: Positions, block_m: int) -> BlockMap:
    """Return the map of positions to tiles of ``block_m`` rows. Its launch has not run yet."""
    ends, E = positions.ends, len(positions.ends)
    tiles = ends.new_empty(max_tiles(positions.max_positions, E, block_m), TILE_RECORD_WORDS.value)
    num_tiles = ends.new_empty(1)
    lanes = triton.next_power_of_2(E)
    options = {"EXPERTS": E, "EXPERT_LANES": lanes, "BLOCK": _TILES_PER_STEP, "num_warps": 4}
    launch = Launch(kernel_write_tile_records, (E,), (ends, tiles, num_tiles, block_m), options)
    rows = ends if positions.rows is None else positions.rows
    return BlockMap(E, 1, block_m, rows, rows, ends, tiles, num_tiles, (launch,))


def gather_positions(positions: Positions, A: torch.Tensor) -> tuple[torch.Tensor, Launch]:
    """Return memory for a row of A per position, and the launch that fills the used rows."""
    out = A.new_empty(positions.max_positions, A.shape[1])
    block = min(4096, triton.next_power_of_2(A.shape[1]))
    grid = (min(positions.max_positions, 8 * current_device().num_sms),)
    arguments = A, A.stride(0), positions.rows, positions.ends, out, A.shape[1]
    options = {"EXPERTS": len(positions.ends), "BLOCK": block, "num_warps": 8}
    return out, Launch(kernel_gather_positions, grid, arguments, options)


@jit
def rows_of_experts(ends_ptr, block_m, EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr):
    """Return four vectors: the experts, their first and end rows, and their numbers of tiles."""
    lane = tl.arange(0, EXPERT_LANES)
    end = tl.load(ends_ptr + lane, mask=lane < EXPERTS, other=0)
    begin = tl.load(ends_ptr + lane - 1, mask=(lane < EXPERTS) & (lane > 0), other=0)
    return lane, begin, end, tl.where(lane < EXPERTS, tl.cdiv(end - begin, block_m), 0)


@jit(do_not_specialize=["block_m"])
def kernel_write_tile_records(
    ends_ptr, tiles_ptr, num_tiles_ptr, block_m,
    EXPERTS: tl.constexpr, EXPERT_LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the records of each expert's tiles (``TILE_RECORD_WORDS``). Grid (EXPERTS,)."""
    expert = tl.program_id(0)
    lane, begin, end, tiles_of_experts = rows_of_experts(ends_ptr, block_m, EXPERTS, EXPERT_LANES)
    first = tl.sum(tl.where(lane < expert, tiles_of_experts, 0), 0)
    tiles = tl.sum(tl.where(lane == expert, tiles_of_experts, 0), 0)
    begin_row = tl.sum(tl.where(lane == expert, begin, 0), 0)
    end_row = tl.sum(tl.where(lane == expert, end, 0), 0)
    for first_tile in range(0, tiles, BLOCK):
        tile = first_tile + tl.arange(0, BLOCK)
        store_records(tiles_ptr, first, tile, tiles, expert, begin_row, end_row)
    if expert == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles_of_experts, 0))


@jit
def kernel_gather_positions(
    a_ptr, stride, rows_ptr, ends_ptr, out_ptr, columns, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy the row of A that each used position refers to, to out [positions, columns]. Any
    grid."""
    for position in range(tl.program_id(0), tl.load(ends_ptr + EXPERTS - 1), tl.num_programs(0)):
        row = tl.load(rows_ptr + position).to(tl.int64)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = tl.load(a_ptr + row * stride + column, mask=column < columns)
            out = out_ptr + tl.cast(position, tl.int64) * columns + column
            tl.store(out, value, mask=column < columns)
