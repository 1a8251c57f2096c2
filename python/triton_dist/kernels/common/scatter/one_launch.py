"""A sum of products over ranks in one launch, for few rows: tiles go to who needs them, and once
all are multiplied, all programs add what has come.

``A[M, K] @ B[K, N]`` is this rank's addend. Who adds a row:

=============  ===========  ==================================================================
``TO_OWNERS``  ``PASS_ON``
=============  ===========  ==================================================================
no             no           all ranks: an all-reduce in one shot
yes            no           its owner, each rank M / NUM_RANKS rows in turn: a reduce-scatter
yes            yes          its owner, who sends the sum to all: an all-reduce in two shots;
                            the last owners may have fewer rows, or none
=============  ===========  ==================================================================

A program stores each of its tiles, rounded to the output's dtype, into this rank's part of a slot
of who adds it, [source rank, rows, N] with ``shard_elements`` elements a part. When it has stored
all, it tells the programs of the same number on all ranks, its own one too. Then what a rank adds
is dealt out to all its programs in sub-tiles of ``SUB_TILE_ROWS`` rows of a tile's columns. Who has
a sub-tile waits for that program of all ranks that has multiplied it, and adds these partial sums
in fp32 in the order of ranks: the same bits at every call, and on every rank. Sums that are passed
on go to [M, N] behind the parts of each rank's slot; who has added all its sub-tiles says so, and
each program takes those of its number from there.

Tiles are of the whole product, whoever needs their rows: B is read once for each BLOCK_SIZE_M rows,
not once for each rank. They are visited down the columns, so that at any time something goes to
each rank.

This is an exchange (``exchange/protocol.py``), with its memory, its count of calls, and its
reasons why a slot is free: every call waits for something of every peer. So there is no look at
the peers before the kernel, and nothing to tell them behind it.

*Sub-tiles.* The tiles of a product are numbered down its columns of tiles, and program p multiplies
one of each *wave*: those with the numbers p, p + NUM_SMS, …. What a rank adds is in part of the
rows of tiles, ``own_tiles`` of the ``tiles_m`` of each column. Each own tile is cut in *sub-tiles*
of ``SUB_TILE_ROWS`` rows, and those of a column are dealt out evenly to ``tiles_m`` programs, from
the one on that multiplied the first of them:

    tiles_m = 4, own tile 2, 4 sub-tiles       program 0   1   2   3   4   5   6   7   8   9
                                            sub-tile           0   1   2   3   4   5   6   7
                                            of tile         2   2   2   2   6   6   6   6

So all programs add, and who adds a sub-tile has a number that is no smaller than that of who
multiplied it; those of a wave's last column go to as many programs as there are.

*Why nobody waits in a circle*, however few multiprocessors a launch gets. All programs send before
they wait, and they wait for programs of their own number or of smaller ones. So of all that wait,
those of the smallest number have peers that are running or will run, and smaller ones have ended.

Tiles are stored by ordinary stores: they are few, and a release orders such stores, while a TMA
store has to be waited for first, and needs a descriptor for each peer.

==============  ==========  =======================================  ============================
argument        dtype       shape                                    who writes
==============  ==========  =======================================  ============================
a, b            of A        [M, K], [K, N] with ``strides``          the caller
out.c           of A        [M, N], or with ``TO_OWNERS`` alone      this kernel
                            [M / NUM_RANKS, N]
out.bias        of A        [N], or ``None``                         the caller
out.sums        int64       ``slots.table``, or ``None``: nothing    the host, once
                            is passed on
slots, peers                as of ``exchange/protocol.py``; a slot is parts [NUM_RANKS,
                            shard_elements], then with ``PASS_ON`` sums [M, N]
M, rank         int         not specialised                          the host
tile, plan      constants   ``Tile``; ``Plan``, whose BLOCK is       the host
                            SUB_TILE_ROWS
==============  ==========  =======================================  ============================
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
    await_peers,
    await_programs,
    begin,
    behind,
    flag_of_chunk,
    notify_ranks,
)
from triton_dist.kernels.common.gemm.tile import Strides, multiply_operands, operands_at
from triton_dist.kernels.common.launch import Launch, fits_descriptor, normalise_strides
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.partials import Out
from triton_dist.kernels.common.scatter.tiles import (
    add_partials,
    rows_at_once,
    store_tile_by_pointers,
    tile_of,
)


@jit
def own_tiles_of(own_begin, own_end, BLOCK_SIZE_M: tl.constexpr):
    """(first, how many) of the rows of tiles in which the rows from ``own_begin`` to ``own_end``
    are."""
    first = own_begin // BLOCK_SIZE_M
    return first, tl.maximum(tl.cdiv(own_end, BLOCK_SIZE_M) - first, 0)


@jit
def _sub_tiles_before(number, first, own_tiles, tiles_m, SUB_TILES: tl.constexpr):
    """Sub-tiles of tiles with numbers below ``number``."""
    of_column = tl.minimum(tl.maximum(number % tiles_m - first, 0), own_tiles)
    return (number // tiles_m * own_tiles + of_column) * SUB_TILES


@jit
def _dealt_before(
    program, wave, begin, end, first, own_tiles, tiles_m, num_programs, SUB_TILES: tl.constexpr
):
    """The first of the sub-tiles from ``begin`` to ``end``, all of a wave, that goes to ``program``
    or to a later one."""
    of_column = own_tiles * SUB_TILES
    dealt = tl.cdiv(tl.maximum(wave + program - first, 0) * of_column, tiles_m)
    # Those of the wave's last column go to as many programs as there are from ``lowest`` on.
    last = tl.maximum((end - 1) // of_column * of_column, begin)
    tile = last // SUB_TILES
    lowest = tile // own_tiles * tiles_m + first + tile % own_tiles - wave
    width = tl.minimum(tl.cdiv((end - last) * tiles_m, of_column), num_programs - lowest)
    dealt_of_last = last + tl.cdiv(tl.maximum(program - lowest, 0) * (end - last), width)
    earlier = tl.minimum(tl.maximum(dealt, begin), last)
    return tl.where(program < lowest, earlier, tl.minimum(dealt_of_last, end))


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
):
    """(first, end) of the sub-tiles that this program adds, of the wave of tiles that begins with
    number ``wave``."""
    SUB_TILES: tl.constexpr = BLOCK_SIZE_M // SUB_TILE_ROWS
    first, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    next_wave = tl.minimum(wave + NUM_SMS, tiles_m * tiles_n)
    begin = _sub_tiles_before(wave, first, own_tiles, tiles_m, SUB_TILES)
    end = _sub_tiles_before(next_wave, first, own_tiles, tiles_m, SUB_TILES)
    program, programs = tl.program_id(0), tl.num_programs(0)
    dealt, dealt_next = end, end
    if begin < end:
        dealt = _dealt_before(
            program, wave, begin, end, first, own_tiles, tiles_m, programs, SUB_TILES
        )
        dealt_next = _dealt_before(
            program + 1, wave, begin, end, first, own_tiles, tiles_m, programs, SUB_TILES
        )
    return dealt, dealt_next


@jit
def place_of_sub_tile(
    sub_tile, own_begin, own_end, tiles_m, BLOCK_SIZE_M: tl.constexpr, SUB_TILE_ROWS: tl.constexpr
):
    """(row, end, n, number) of a sub-tile: it begins with ``row`` of the own ones and ends before
    ``end`` at the latest, is in column ``n`` of tiles, and in the tile of that number. One of a
    tile that is not all own may be empty."""
    SUB_TILES: tl.constexpr = BLOCK_SIZE_M // SUB_TILE_ROWS
    first, own_tiles = own_tiles_of(own_begin, own_end, BLOCK_SIZE_M)
    n = sub_tile // (own_tiles * SUB_TILES)
    m = first + sub_tile // SUB_TILES % own_tiles
    row = tl.maximum(m * BLOCK_SIZE_M, own_begin) + sub_tile % SUB_TILES * SUB_TILE_ROWS
    end = tl.minimum((m + 1) * BLOCK_SIZE_M, own_end)
    return row - own_begin, end - own_begin, n, n * tiles_m + m


def programs_for(tiles_m: int, tiles_n: int, last_begin: int, block_m: int) -> int:
    """Number of programs that have something to do in a wave of all tiles, where the rank with the
    last rows begins with row ``last_begin``: its last sub-tiles go to programs that multiply
    nothing."""
    return tiles_m * tiles_n + min(last_begin // block_m, tiles_m - 1)


@jit(do_not_specialize=["M", "rank"])
def kernel_gemm_exchange(
    a_ptr,
    b_ptr,
    strides,
    out,
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
    """``DESCRIPTORS``: read A and B through tensor descriptors (TMA from sm_90 on), else by
    pointers, of any strides. ``plan.BLOCK``: SUB_TILE_ROWS, a power of two. ``PASS_ON``: where
    there are ``out.sums``. Grid (programs,), up to NUM_SMS; fewer only if none has to multiply
    twice."""
    NUM_RANKS: tl.constexpr = plan.NUM_RANKS
    PRECISION: tl.constexpr = tile.PRECISION
    SUB_TILE_ROWS: tl.constexpr = plan.BLOCK
    PASS_ON: tl.constexpr = out.sums is not None
    # What needs no product comes first, so that it is under way meanwhile.
    call = begin(slots, peers, M, rank, plan)
    tiles_m, tiles_n = tl.cdiv(M, tile.M), tl.cdiv(N, tile.N)
    rows, own_begin, own_end = M, 0, M  # what a rank adds
    if TO_OWNERS:
        rows = tl.cdiv(M, NUM_RANKS)
        own_begin = rank * rows
        own_end = min(own_begin + rows, M)
    a, b = operands_at(
        a_ptr, b_ptr, M, N, K, strides.bk, strides.bn,
        DESCRIPTORS, tile.B_COLUMN_MAJOR, tile.M, tile.N, tile.K,
    )  # fmt: skip
    tiles = tiles_m * tiles_n
    for number in range(tl.program_id(0), tiles, NUM_SMS):
        row, column = number % tiles_m * tile.M, number // tiles_m * tile.N
        accumulator = multiply_operands(
            a, b, row, column, M, N, K, strides.am, strides.ak, strides.bk, strides.bn,
            DESCRIPTORS, tile.B_COLUMN_MAJOR, PRECISION, tile.M, tile.N, tile.K, tile.INT64_OFFSETS,
        )  # fmt: skip
        for step in tl.static_range(1, NUM_RANKS + 1):
            adds = (rank + step) % NUM_RANKS
            first_row = row
            if TO_OWNERS:  # before its first row, or behind its last one, nothing is stored
                first_row = row - adds * rows
            if (first_row < rows) & (first_row > -tile.M):
                target_ptr = target_at(slots.table, adds, slots.data) + call.offset
                store_tile_by_pointers(
                    target_ptr + rank.to(tl.int64) * shard_elements, accumulator, first_row, column,
                    rows, N, False, tile.M, tile.N, tile.INT64_OFFSETS,
                )  # fmt: skip
    value = flag_of_chunk(call, 0)
    notify_ranks(call, 0, value, plan)
    # With PASS_ON: [M, N]
    sums_offset = call.offset + NUM_RANKS * shard_elements.to(tl.int64)
    own_offset = 0  # of the own rows in C
    if PASS_ON:
        own_offset = rank.to(tl.int64) * rows * N
    for wave in range(0, tiles, NUM_SMS):
        begin_sub_tile, end = sub_tiles_of_program(
            wave, own_begin, own_end, tiles_m, tiles_n, NUM_SMS, tile.M, SUB_TILE_ROWS
        )
        for sub_tile in range(begin_sub_tile, end):
            row, end_row, n, of_tile = place_of_sub_tile(
                sub_tile, own_begin, own_end, tiles_m, tile.M, SUB_TILE_ROWS
            )
            if row < end_row:
                multiplied = tl.full((plan.LANES,), 0, tl.int32) + of_tile % NUM_SMS
                token = await_programs(peers, 0, multiplied, value, plan)
                add_partials(
                    slots.data + call.offset, shard_elements, out, own_offset,
                    sums_offset + own_offset, row, n * tile.N, end_row, N, token, rank,
                    NUM_RANKS, False, SUB_TILE_ROWS, tile.N, SUB_TILE_ROWS, tile.INT64_OFFSETS,
                )  # fmt: skip
    if PASS_ON:
        notify_ranks(call, 1, value, plan)
        token = await_peers(peers, 1, value, plan)
        for step in tl.static_range(1, NUM_RANKS):
            begin_row = (rank + step) % NUM_RANKS * rows
            first = begin_row.to(tl.int64) * N
            _copy_sub_tiles(
                slots.data + behind(sums_offset, token) + first, out.c + first, begin_row,
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
    """Copy what the program of this number has added on the rank that adds these rows."""
    if INT64_OFFSETS:
        N = tl.cast(N, tl.int64)
    inside = tl.arange(0, SUB_TILE_ROWS)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for wave in range(0, tiles_m * tiles_n, NUM_SMS):
        begin, end = sub_tiles_of_program(
            wave, begin_row, end_row, tiles_m, tiles_n, NUM_SMS, BLOCK_SIZE_M, SUB_TILE_ROWS
        )
        for sub_tile in range(begin, end):
            row, end_of_sub_tile, n, _ = place_of_sub_tile(
                sub_tile, begin_row, end_row, tiles_m, BLOCK_SIZE_M, SUB_TILE_ROWS
            )
            column = n * BLOCK_SIZE_N
            mask = (tl.arange(0, SUB_TILE_ROWS) < end_of_sub_tile - row)[:, None]
            mask &= (tl.arange(0, BLOCK_SIZE_N) < N - column)[None, :]
            block = inside + (row.to(tl.int64) * N + column)
            # Not from L1, where what the last use left may be.
            values = tl.load(from_ptr + block, mask=mask, cache_modifier=".cg")
            tl.store(to_ptr + block, values, mask=mask)


def programs_of(
    config: triton.Config, M: int, N: int, num_sms: int, num_ranks: int, to_owners: bool
) -> int:
    """Programs of a launch for [M, N], of which rows go to their owners or all to all ranks."""
    most: int = min(num_sms, MAX_CTAS.value)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    last_begin = (num_ranks - 1) * triton.cdiv(M, num_ranks) if to_owners else 0
    tiles = triton.cdiv(M, block_m), triton.cdiv(N, block_n)
    return min(most, programs_for(*tiles, last_begin, block_m))


def options_of(
    A: torch.Tensor, B: torch.Tensor, config: triton.Config, persistent: bool
) -> dict[str, Any]:
    """Constants of every kernel that multiplies tiles and sums them in one launch."""
    tile, options = tile_of(config, A, B)
    may = persistent and tile.PRECISION != "ieee" and A.is_contiguous()
    # Halves of a tile are for TMA stores.
    constants = {"DESCRIPTORS": may and fits_descriptor(A, B), "tile": tile._replace(SUBTILE=False)}
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
    pass_on: bool = False,
) -> Launch:
    """The launch that computes ``A @ B``, sends it to who needs it, and sums what comes into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M, N], or of ``to_owners`` alone
            [M / num_ranks, N], and then M is a multiple of ``num_ranks``; contiguous.
        bias: [N], added to the sum; contiguous.
        slots: of an exchange, as its kernels take them. shard_elements: of a part in a slot.
        persistent: read A and B through descriptors where they can be. As for ``sharded_gemm``,
            what is not contiguous, or no multiple of 16 bytes, goes by pointers all the same.
    """
    A = normalise_strides(A)
    (M, K), N = A.shape, B.shape[1]
    num_ctas = programs_of(config, M, N, num_sms, num_ranks, to_owners)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    sub_tile_rows = rows_at_once(block_m, block_n, num_ranks * A.element_size())
    if to_owners:  # as many sub-tiles as there are programs that multiply a column of tiles
        sub_tile_rows = min(sub_tile_rows, triton.next_power_of_2(triton.cdiv(block_m, num_ranks)))
    options = options_of(A, B, config, persistent)
    options |= {
        "NUM_SMS": min(num_sms, MAX_CTAS.value),
        "TO_OWNERS": to_owners,
        "tile": options["tile"]._replace(GROUP_M=0),  # all rows of tiles, see above
        "plan": Plan(num_ranks, triton.next_power_of_2(num_ranks), sub_tile_rows, 1),
    }
    arguments = (
        A, B, Strides(*A.stride(), *B.stride()),
        Out(C, bias, slots[0].table if pass_on else None, None), *slots, shard_elements,
        N, K, M, rank,
    )  # fmt: skip
    return Launch(kernel_gemm_exchange, (num_ctas,), arguments, options)
