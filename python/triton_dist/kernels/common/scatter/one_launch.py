"""Sum of products over ranks in one launch, for few rows.

Tiles are sent to the ranks that add them. When all tiles are multiplied, all programs add the
received tiles. ``A[M, K] @ B[K, N]`` is this rank's addend. Two constants decide which rank adds a
row:

* neither ``TO_OWNERS`` nor ``BROADCASTS_SUMS``: all ranks, an all-reduce in one shot.
* ``TO_OWNERS``: the rank that owns the row, a reduce-scatter. Each rank owns M / NUM_RANKS rows.
* both: the owner, which sends the sum to all ranks, an all-reduce in two shots. M / NUM_RANKS is
  rounded up, so the last owners may have fewer rows or no rows.

A program rounds each of its tiles to the output's dtype and stores it in the slot of the adding
rank, as this rank's partial. A slot is [source rank, rows, N] with ``shard_elements`` elements per
source. After its last tile the program sets its flag on all ranks, including its own rank. The rows
that a rank adds are then distributed over all its programs, in sub-tiles of ``SUB_TILE_ROWS`` rows.
For each sub-tile, a program waits for the flags of the programs that multiplied the sub-tile. Then
the program adds the partials in fp32 in the order of ranks. Results are deterministic and equal on
all ranks. With ``BROADCASTS_SUMS`` each rank's slot also has memory for the sums [M, N], after the
partials. A program sends the sums of its sub-tiles and sets a flag after the last. The program of
the same number on each peer copies these sums to C.

Tiles are cut from the whole product, not from the rows of each owner, so that B is read once per
BLOCK_SIZE_M rows instead of once per rank. They are traversed down the columns, so that data is
sent to all ranks at all times. Tiles are written by ordinary stores, which a release orders. A TMA
store would need a wait and a descriptor per peer.

The kernel uses the memory and the call counter of ``exchange/protocol.py``. Every call waits for
every peer. A slot is therefore free without a check of the peers, and no report follows the kernel.

*Sub-tiles.* Tiles are numbered down the columns. Program p multiplies the tiles p, p + NUM_SMS, …,
one of each *wave*. In each column, the rows that this rank adds are in ``own_tiles`` of the
``tiles_m`` tiles. These tiles are divided into sub-tiles. The sub-tiles of a column are distributed
evenly over ``tiles_m`` programs, beginning with the program that multiplied the first of them:

    tiles_m = 4, own tile 2, 4 sub-tiles       program 0   1   2   3   4   5   6   7   8   9
                                            sub-tile           0   1   2   3   4   5   6   7
                                            of tile         2   2   2   2   6   6   6   6

Thus all programs add. The program that adds a sub-tile has an equal or larger number than the
program that multiplied it. For a wave's last column, fewer than ``tiles_m`` programs may exist;
they share its sub-tiles.

*Split-K.* If there are fewer tiles than SMs, a group of SPLIT_K programs with successive numbers
multiplies a tile, each program a part of K. The numbers of programs above are then numbers of
groups, of which there are GROUPS = NUM_SMS // SPLIT_K. Each part is a partial of its own, so a slot
is [source rank * SPLIT_K, rows, N]. Only the last program of a group adds. ``BROADCASTS_SUMS``
excludes split-K.

*No deadlock*, even if a launch gets few SMs. All programs send before they wait, and wait only for
programs with equal or smaller numbers. Consider the waiting programs with the smallest number.
Programs with smaller numbers have ended, and programs with this number run or will run on every
peer.

==============  =========  ========================================  ==================
argument        dtype      shape                                     written by
==============  =========  ========================================  ==================
a, b            of A       [M, K], [K, N] with ``strides``           caller
out.c           of C       [M, N]; of a reduce-scatter               this kernel
                           [M / NUM_RANKS, N]
out.bias        of C       [N], or ``None``                          caller
scales          fp32       ``gemm.scales.Scales`` of fp8 operands    caller
out.peer_sums   int64      ``slots.table``; ``None``: one shot       host, once
slots, peers               see ``exchange/protocol.py``; a slot is partials [NUM_RANKS,
                           shard_elements], then sums [M, N]
M, rank         int        not specialised                           host
tile, plan      constants  ``Tile``; ``Plan`` with BLOCK =           host
                           SUB_TILE_ROWS
==============  =========  ========================================  ==================
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.exchange.protocol import (
    MAX_CTAS,
    Peers,
    Plan,
    Slots,
    after_wait,
    await_peers,
    await_programs,
    begin_exchange,
    chunk_flag,
    notify_ranks,
)
from triton_dist.kernels.common.gemm.scales import NO_SCALES, Scales
from triton_dist.kernels.common.gemm.tile import Strides
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.partials import SumOutput
from triton_dist.kernels.common.scatter.tiles import (
    add_partials,
    make_operands,
    multiply_operands,
    rows_per_step,
    store_tile_by_pointers,
    tile_constants,
)
from triton_dist.runtime.launch import Launch, fits_descriptor, normalise_strides


@jit
def own_tiles_of(own_begin, own_end, BLOCK_SIZE_M: tl.constexpr):
    first_own_tile = own_begin // BLOCK_SIZE_M
    return first_own_tile, tl.maximum(tl.cdiv(own_end, BLOCK_SIZE_M) - first_own_tile, 0)


@jit
def _num_sub_tiles_before(tile, first_own_tile, own_tiles, tiles_m, SUB_TILES: tl.constexpr):
    """Return the number of own sub-tiles in tiles before ``tile``."""
    tiles_in_column = tl.minimum(tl.maximum(tile % tiles_m - first_own_tile, 0), own_tiles)
    return (tile // tiles_m * own_tiles + tiles_in_column) * SUB_TILES


@jit
def _first_sub_tile(
    program, wave, begin, end, first_own_tile, own_tiles, tiles_m, num_programs,
    SUB_TILES: tl.constexpr,
):  # fmt: skip
    """Return the first sub-tile that ``program`` or a program with a larger number adds.

    ``begin`` to ``end`` are the sub-tiles of one wave.
    """
    column_sub_tiles = own_tiles * SUB_TILES
    position = tl.maximum(wave + program - first_own_tile, 0)
    first_if_even = tl.cdiv(position * column_sub_tiles, tiles_m)
    # Distribute the sub-tiles of the wave's last column, from ``last_begin`` on, over ``width``
    # programs from ``lowest_program`` on.
    last_begin = tl.maximum((end - 1) // column_sub_tiles * column_sub_tiles, begin)
    count = end - last_begin
    tile = last_begin // SUB_TILES
    lowest_program = tile // own_tiles * tiles_m + first_own_tile + tile % own_tiles - wave
    width = tl.minimum(tl.cdiv(count * tiles_m, column_sub_tiles), num_programs - lowest_program)
    in_last_column = last_begin + tl.cdiv(tl.maximum(program - lowest_program, 0) * count, width)
    in_earlier_columns = tl.minimum(tl.maximum(first_if_even, begin), last_begin)
    return tl.where(program < lowest_program, in_earlier_columns, tl.minimum(in_last_column, end))


@jit
def sub_tiles_of_program(
    wave,
    own_begin,
    own_end,
    tiles_m,
    tiles_n,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    SUB_TILE_ROWS: tl.constexpr,
    SPLIT_K: tl.constexpr = 1,
):
    """Return (first, end) of this program's sub-tiles of the wave whose first tile is ``wave``.

    NUM_SMS is the number of groups of SPLIT_K programs. Only the last program of a group adds.
    """
    SUB_TILES: tl.constexpr = BLOCK_SIZE_M // SUB_TILE_ROWS
    first_own_tile, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    next_wave = tl.minimum(wave + NUM_SMS, tiles_m * tiles_n)
    begin = _num_sub_tiles_before(wave, first_own_tile, own_tiles, tiles_m, SUB_TILES)
    end = _num_sub_tiles_before(next_wave, first_own_tile, own_tiles, tiles_m, SUB_TILES)
    program, programs = tl.program_id(0) // SPLIT_K, tl.num_programs(0) // SPLIT_K
    begin_of_program, end_of_program = end, end
    if (begin < end) & (tl.program_id(0) % SPLIT_K == SPLIT_K - 1):
        begin_of_program = _first_sub_tile(
            program, wave, begin, end, first_own_tile, own_tiles, tiles_m, programs, SUB_TILES
        )
        end_of_program = _first_sub_tile(
            program + 1, wave, begin, end, first_own_tile, own_tiles, tiles_m, programs, SUB_TILES
        )
    return begin_of_program, end_of_program


@jit
def locate_sub_tile(
    sub_tile, own_begin, own_end, tiles_m, BLOCK_SIZE_M: tl.constexpr, SUB_TILE_ROWS: tl.constexpr
):
    """Return (row, end, n, number) of a sub-tile.

    ``row`` is its first row and ``end`` an upper bound of its end, counted from ``own_begin``, the
    first row that this rank adds. ``n`` is its column of tiles, ``number`` its tile. The sub-tile
    may be empty if the tile also has rows of other ranks.
    """
    SUB_TILES: tl.constexpr = BLOCK_SIZE_M // SUB_TILE_ROWS
    first_own_tile, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    n = sub_tile // (own_tiles * SUB_TILES)
    m = first_own_tile + sub_tile // SUB_TILES % own_tiles
    row = tl.maximum(m * BLOCK_SIZE_M, own_begin) + sub_tile % SUB_TILES * SUB_TILE_ROWS
    end = tl.minimum((m + 1) * BLOCK_SIZE_M, own_end)
    return row - own_begin, end - own_begin, n, n * tiles_m + m


def programs_with_work(tiles_m: int, tiles_n: int, last_begin: int, block_m: int) -> int:
    """Return the number of programs that have work if all tiles are in one wave.

    ``last_begin`` is the first row of the last rank. Programs without a tile add the last sub-tiles
    of this rank.
    """
    return tiles_m * tiles_n + min(last_begin // block_m, tiles_m - 1)


@jit(do_not_specialize=["M", "rank"])
def kernel_gemm_exchange(
    a_ptr,
    b_ptr,
    strides,
    out,
    scales,
    slots,
    peers,
    shard_elements,
    N,
    K,
    M,
    rank,
    NUM_SMS: tl.constexpr,
    TO_OWNERS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    tile: tl.constexpr,
    plan: tl.constexpr,
):
    """Multiply, exchange and add in one launch.

    ``DESCRIPTORS``: read A and B through tensor descriptors (TMA from sm_90 on), otherwise by
    pointers with any strides. ``plan.BLOCK``: SUB_TILE_ROWS, a power of two. ``BROADCASTS_SUMS`` is
    true if ``out.peer_sums`` is not ``None``. Grid (programs,): NUM_SMS, or fewer if each program
    has at most one tile.
    """
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    SUB_TILE_ROWS: tl.constexpr = plan.BLOCK
    BROADCASTS_SUMS: tl.constexpr = out.peer_sums is not None
    SPLIT_K: tl.constexpr = tile.SPLIT_K
    GROUPS: tl.constexpr = NUM_SMS // SPLIT_K
    # Operations that do not need the product come first, to overlap with it.
    call = begin_exchange(slots, peers, M, rank, plan)
    tiles_m, tiles_n = tl.cdiv(M, tile.M), tl.cdiv(N, tile.N)
    rows, own_begin, own_end = M, 0, M  # rows that one rank adds
    if TO_OWNERS:
        rows = tl.cdiv(M, NUM_RANKS)
        own_begin = rank * rows
        own_end = min(own_begin + rows, M)
    a, b = make_operands(a_ptr, b_ptr, M, N, K, strides.bk, strides.bn, DESCRIPTORS, tile)
    tiles = tiles_m * tiles_n
    split = tl.program_id(0) % SPLIT_K
    partial_index = (rank * SPLIT_K + split).to(tl.int64)  # in a slot
    for number in range(tl.program_id(0) // SPLIT_K, tiles, GROUPS):
        row, column = number % tiles_m * tile.M, number // tiles_m * tile.N
        accumulator = multiply_operands(
            a, b, row, column, M, N, K, strides, scales, DESCRIPTORS, tile, split, SPLIT_K
        )
        for step in tl.static_range(1, NUM_RANKS + 1):
            adding_rank = (rank + step) % NUM_RANKS
            first_row = row
            # A tile may extend beyond the owner's rows; only the owner's rows are stored.
            if TO_OWNERS:
                first_row = row - adding_rank * rows
            if (first_row < rows) & (first_row > -tile.M):
                target_ptr = target_at(slots.table, adding_rank, slots.data) + call.offset
                store_tile_by_pointers(
                    target_ptr + partial_index * shard_elements, accumulator, first_row, column,
                    rows, N, False, tile.M, tile.N, tile.INT64_OFFSETS,
                )  # fmt: skip
    value = chunk_flag(call, 0)
    notify_ranks(call, 0, value, plan)
    # Position of sums [M, N] in the slot, with BROADCASTS_SUMS.
    sums_offset = call.offset + NUM_RANKS * shard_elements.to(tl.int64)
    own_offset = 0  # begin, in C, of the rows that this rank adds
    if BROADCASTS_SUMS:
        own_offset = rank.to(tl.int64) * rows * N
    for wave in range(0, tiles, GROUPS):
        first_sub_tile, end = sub_tiles_of_program(
            wave, own_begin, own_end, tiles_m, tiles_n, GROUPS, tile.M, SUB_TILE_ROWS, SPLIT_K
        )
        for sub_tile in range(first_sub_tile, end):
            row, end_row, n, tile_number = locate_sub_tile(
                sub_tile, own_begin, own_end, tiles_m, tile.M, SUB_TILE_ROWS
            )
            if row < end_row:
                first_program = tile_number % GROUPS * SPLIT_K
                token = await_programs(peers, 0, first_program, value, plan, SPLIT_K)
                add_partials(
                    slots.data + call.offset, shard_elements, out, own_offset,
                    sums_offset + own_offset, row, n * tile.N, end_row, N, token, rank,
                    NUM_RANKS, False, SUB_TILE_ROWS, tile.N, SUB_TILE_ROWS, tile.INT64_OFFSETS,
                    SPLIT_K,
                )  # fmt: skip
    if BROADCASTS_SUMS:
        notify_ranks(call, 1, value, plan)
        token = await_peers(peers, 1, value, plan)
        for step in tl.static_range(1, NUM_RANKS):
            begin_row = (rank + step) % NUM_RANKS * rows
            first = begin_row.to(tl.int64) * N
            _copy_sub_tiles(
                slots.data + after_wait(sums_offset, token) + first, out.c + first, begin_row,
                min(begin_row + rows, M), N, tiles_m, tiles_n, NUM_SMS, tile.M, tile.N,
                SUB_TILE_ROWS, tile.INT64_OFFSETS,
            )  # fmt: skip


@jit
def _copy_sub_tiles(
    from_ptr,
    to_ptr,
    begin_row,
    end_row,
    N,
    tiles_m,
    tiles_n,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    SUB_TILE_ROWS: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Copy the sums that the program with this program's number has sent from another rank.

    That rank owns rows ``begin_row`` to ``end_row``.
    """
    if INT64_OFFSETS:
        N = tl.cast(N, tl.int64)
    inside = tl.arange(0, SUB_TILE_ROWS)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for wave in range(0, tiles_m * tiles_n, NUM_SMS):
        begin, end = sub_tiles_of_program(
            wave, begin_row, end_row, tiles_m, tiles_n, NUM_SMS, BLOCK_SIZE_M, SUB_TILE_ROWS
        )
        for sub_tile in range(begin, end):
            row, end_of_sub_tile, n, _ = locate_sub_tile(
                sub_tile, begin_row, end_row, tiles_m, BLOCK_SIZE_M, SUB_TILE_ROWS
            )
            column = n * BLOCK_SIZE_N
            mask = (tl.arange(0, SUB_TILE_ROWS) < end_of_sub_tile - row)[:, None]
            mask &= (tl.arange(0, BLOCK_SIZE_N) < N - column)[None, :]
            block = inside + (row.to(tl.int64) * N + column)
            # The load bypasses L1, which may hold stale data.
            values = tl.load(from_ptr + block, mask=mask, cache_modifier=".cg")
            tl.store(to_ptr + block, values, mask=mask)


def num_splits_of(config: triton.Config) -> int:
    splits: int = config.kwargs.get("SPLIT_K", 1)
    return splits


def max_programs(config: triton.Config, num_sms: int) -> int:
    """Return the largest grid; at least one group of programs."""
    max_ctas: int = MAX_CTAS.value
    return max(min(num_sms, max_ctas), num_splits_of(config))


def num_exchange_programs(
    config: triton.Config, M: int, N: int, num_sms: int, num_ranks: int, to_owners: bool
) -> int:
    max_ctas = max_programs(config, num_sms)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    last_begin = (num_ranks - 1) * triton.cdiv(M, num_ranks) if to_owners else 0
    tiles, splits = (triton.cdiv(M, block_m), triton.cdiv(N, block_n)), num_splits_of(config)
    return min(max_ctas // splits, programs_with_work(*tiles, last_begin, block_m)) * splits


def one_launch_options(
    A: torch.Tensor, B: torch.Tensor, config: triton.Config, persistent: bool, scaling: int = 0
) -> dict[str, Any]:
    """Return the constants of kernels that multiply and sum tiles in one launch."""
    tile, options = tile_constants(config, A, B, scaling=scaling)
    by_descriptor = persistent and tile.PRECISION != "ieee" and A.is_contiguous()
    # SUBTILE halves the tiles of TMA stores, which these kernels do not use.
    constants = {
        "DESCRIPTORS": by_descriptor and fits_descriptor(A, B),
        "tile": tile._replace(SUBTILE=False),
    }
    return options | constants


def exchanged_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    slots: tuple[Slots, Peers],
    shard_elements: int,
    *,
    rank: int,
    num_ranks: int,
    num_sms: int,
    persistent: bool,
    to_owners: bool,
    broadcasts_sums: bool = False,
    scales: tuple[Scales, int] = (NO_SCALES, 0),
) -> Launch:
    """Return the launch that computes ``A @ B``, exchanges its tiles, and sums them in C.

    Args:
        C: [M, N], contiguous. With ``to_owners`` but not ``broadcasts_sums``, [M / num_ranks, N],
            and M is a multiple of ``num_ranks``.
        bias: [N], added to the sum; contiguous.
        slots: kernel arguments ``slots`` and ``peers`` of an exchange.
        shard_elements: number of elements of a partial in a slot.
        persistent: read A and B through descriptors if TMA supports their layout.
        to_owners, broadcasts_sums: the constants that the module describes.
        scales: result of ``Scaling.kernel_argument`` without a bias.
    """
    A = normalise_strides(A)
    (M, K), N = A.shape, B.shape[1]
    num_ctas = num_exchange_programs(config, M, N, num_sms, num_ranks, to_owners)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    partial_bytes = num_ranks * num_splits_of(config) * C.element_size()
    sub_tile_rows = rows_per_step(block_m, block_n, partial_bytes)
    if to_owners:  # one sub-tile for each program that multiplies a column of tiles
        sub_tile_rows = min(sub_tile_rows, triton.next_power_of_2(triton.cdiv(block_m, num_ranks)))
    options = one_launch_options(A, B, config, persistent, scales[1])
    options |= {
        "NUM_SMS": max_programs(config, num_sms),
        "TO_OWNERS": to_owners,
        "tile": options["tile"]._replace(GROUP_M=0),  # unused: tiles are numbered down the columns
        "plan": Plan(num_ranks, triton.next_power_of_2(num_ranks), sub_tile_rows, 1),
    }
    arguments = (
        A, B, Strides(*A.stride(), *B.stride()),
        SumOutput(C, bias, slots[0].table if broadcasts_sums else None, None), scales[0], *slots,
        shard_elements, N, K, M, rank,
    )  # fmt: skip
    return Launch(kernel_gemm_exchange, (num_ctas,), arguments, options)
