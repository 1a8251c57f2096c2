"""``kernel_gemm_scatter_persistent`` with specialised warps, for Hopper, in Gluon: of the ways to
scatter, slabs that a copy engine pushes (``"slab"``).

One producer warp loads, two groups of warps multiply (``warp_specialized_tile.py``). Tiles come in
scatter order and are stored to memory of this rank, those of the own slab too. Each group stores
its half of a tile and counts it: a tile of another rank's slab counts two.

Nobody waits for a peer here and nothing is added, so ranks cannot wait in a circle. What adds comes
after it (``sum_parts.py``).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from triton_dist import language as dl
from triton_dist.kernels.common.scattered_tiles import announce_tile
from triton_dist.kernels.common.split_k import part_of_unit, units_of_tiles
from triton_dist.kernels.common.tiles import tile_in_scatter_order
from triton_dist.kernels.common.warp_specialized_tile import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    allocate_ring,
    describe_b,
    finish_part,
    load_tile,
    multiply_half,
    steps_of_part,
    store_half,
)

SLAB = tl.constexpr("slab")


@gluon.jit
def _produce(
    a_ptr, b_ptr, a_ring, b_ring, full, empty, M, rows, N, K, stride_b, rank,
    NUM_RANKS: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr, NUM_SMS: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr, GROUP_SIZE_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The producer warp."""
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles = NUM_RANKS * tiles_m * tiles_n
    whole = tiles // NUM_SMS * NUM_SMS  # those of full waves
    a_desc = tma.make_tensor_descriptor(
        a_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K], a_ring.layout
    )
    b_desc = describe_b(b_ptr, N, K, stride_b, b_ring, B_COLUMN_MAJOR)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for unit in range(gl.program_id(0), units_of_tiles(tiles, whole, SPLIT_K), NUM_SMS):
        tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
        slab, _, m, n = tile_in_scatter_order(
            tile, rank, NUM_RANKS, tiles_m, tiles_n, tiles_m, GROUP_SIZE_M
        )
        first_step, end_step = steps_of_part(K, part, num_parts, BLOCK_SIZE_K)
        stage, phase = load_tile(
            a_desc, b_desc, a_ring, b_ring, full, empty, stage, phase,
            slab * rows + m * BLOCK_SIZE_M, n * BLOCK_SIZE_N, first_step, end_step, B_COLUMN_MAJOR,
        )  # fmt: skip


@gluon.jit
def _count_half(flags_ptr, epoch_ptr, slab, chunk, rank, NUM_RANKS: gl.constexpr):
    """Count the half of a tile that this group has stored, once it is complete."""
    dl.publish_tile()
    announce_tile(flags_ptr, epoch_ptr, slab, chunk, rank, NUM_RANKS, SLAB)


@gluon.jit
def _consume(
    GROUP: gl.constexpr, staged_ptr, flags_ptr, epoch_ptr, partials_ptr, counters_ptr, a_ring,
    b_ring, staging, full, empty, rows, N, K, slot_stride, chunk_tiles_m, rank,
    NUM_RANKS: gl.constexpr, ANNOUNCE_LATER: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
    NUM_SMS: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    EPILOGUE_SUBTILE: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The ``GROUP``-th group of consumer warps: the same units in the same order as the
    producer."""
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    HALF_M: gl.constexpr = BLOCK_SIZE_M // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_SIZE_N, 16]
    )
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles = NUM_RANKS * tiles_m * tiles_n
    whole = tiles // NUM_SMS * NUM_SMS  # those of full waves
    staged_desc = tma.make_tensor_descriptor(
        staged_ptr,
        [NUM_RANKS, rows, N],
        [slot_stride.to(gl.int64), N, 1],
        [1, HALF_M, staging.shape[3]],
        staging.layout,
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    # What is to be counted yet; of the own slab: nothing.
    stored_slab, stored_chunk = rank, gl.to_tensor(0)
    for unit in range(gl.program_id(0), units_of_tiles(tiles, whole, SPLIT_K), NUM_SMS):
        tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
        first_step, end_step = steps_of_part(K, part, num_parts, BLOCK_SIZE_K)
        accumulator, stage, phase = multiply_half(
            GROUP, a_ring, b_ring, full, empty, stage, phase, end_step - first_step,
            B_COLUMN_MAJOR, LAYOUT,
        )  # fmt: skip
        if ANNOUNCE_LATER:  # noqa: SIM102  # a constexpr: not to be joined with the other condition
            if stored_slab != rank:
                _count_half(flags_ptr, epoch_ptr, stored_slab, stored_chunk, rank, NUM_RANKS)
                stored_slab = rank
        is_complete = True
        if SPLIT_K > 1:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
            if num_parts > 1:
                is_complete, accumulator = finish_part(
                    GROUP, accumulator, partials_ptr, counters_ptr, tile - whole, part, SPLIT_K
                )
        if is_complete:
            # Not sooner, for the sake of registers.
            slab, _, m, n = tile_in_scatter_order(
                tile, rank, NUM_RANKS, tiles_m, tiles_n, tiles_m, GROUP_SIZE_M
            )
            store_half(
                staged_desc, accumulator, staging.index(GROUP), slab,
                m * BLOCK_SIZE_M + GROUP * HALF_M, n * BLOCK_SIZE_N, EPILOGUE_SUBTILE,
            )  # fmt: skip
            stored_slab, stored_chunk = slab, m // chunk_tiles_m
        if not ANNOUNCE_LATER:  # noqa: SIM102  # as above
            if stored_slab != rank:
                _count_half(flags_ptr, epoch_ptr, stored_slab, stored_chunk, rank, NUM_RANKS)
                stored_slab = rank
    if ANNOUNCE_LATER:  # noqa: SIM102  # a constexpr: not to be joined with the other condition
        if stored_slab != rank:  # of a program whose last tile is for others
            _count_half(flags_ptr, epoch_ptr, stored_slab, stored_chunk, rank, NUM_RANKS)
    tma.store_wait(0)  # shared memory is to stay until it is read


@gluon.jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_warp_specialized(
    a_ptr,
    b_ptr,
    staged_ptr,
    flags_ptr,
    epoch_ptr,
    M,
    rows,
    N,
    K,
    stride_b,
    slot_stride,
    chunk_tiles_m,
    rank,
    NUM_RANKS: gl.constexpr,
    ANNOUNCE_LATER: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    NUM_SMS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    EPILOGUE_SUBTILE: gl.constexpr,
    SPLIT_K: gl.constexpr = 1,
    partials_ptr=None,
    counters_ptr=None,
):
    """Multiply A [M, K], ``NUM_RANKS`` slabs of ``rows`` rows, into ``staged_ptr`` [NUM_RANKS,
    slot_stride]; 16-bit operands. Launched with 4 warps, those of a group; grid
    (min(NUM_SMS, units of work),).

    Half a tile of slab s is counted in int32 ``flags_ptr[s]``, an address, one for each
    ``chunk_tiles_m`` rows of tiles. ``ANNOUNCE_LATER``: when its group has multiplied its next one;
    by then its store is complete, and the group does not wait for it. ``epoch_ptr`` is for its type
    alone. ``partials_ptr``, ``counters_ptr``: the workspace of ``SPLIT_K`` (``split_k.py``).
    """
    a_ring, b_ring, staging, full, empty = allocate_ring(
        a_ptr.dtype.element_ty, NUM_STAGES, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        B_COLUMN_MAJOR, EPILOGUE_SUBTILE,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (
                0, staged_ptr, flags_ptr, epoch_ptr, partials_ptr, counters_ptr, a_ring, b_ring,
                staging, full, empty, rows, N, K, slot_stride, chunk_tiles_m, rank, NUM_RANKS,
                ANNOUNCE_LATER, B_COLUMN_MAJOR, NUM_SMS, BLOCK_SIZE_N, GROUP_SIZE_M,
                EPILOGUE_SUBTILE, SPLIT_K,
            )),
            (_consume, (
                1, staged_ptr, flags_ptr, epoch_ptr, partials_ptr, counters_ptr, a_ring, b_ring,
                staging, full, empty, rows, N, K, slot_stride, chunk_tiles_m, rank, NUM_RANKS,
                ANNOUNCE_LATER, B_COLUMN_MAJOR, NUM_SMS, BLOCK_SIZE_N, GROUP_SIZE_M,
                EPILOGUE_SUBTILE, SPLIT_K,
            )),
            (_produce, (
                a_ptr, b_ptr, a_ring, b_ring, full, empty, M, rows, N, K, stride_b, rank, NUM_RANKS,
                B_COLUMN_MAJOR, NUM_SMS, BLOCK_SIZE_N, GROUP_SIZE_M, SPLIT_K,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
