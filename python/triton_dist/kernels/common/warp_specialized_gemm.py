"""``kernel_gemm_persistent`` with specialised warps, for Hopper, in Gluon: same arguments, same
order.

One producer warp loads, two groups of warps multiply (``warp_specialized_tile.py``). The producer
alone waits for the flags of gathered rows: a wait holds up no multiplication of what is there.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from triton_dist import language as dl
from triton_dist.kernels.common.sharded_gemm import wait_for_rows
from triton_dist.kernels.common.split_k import part_of_unit, units_of_tiles
from triton_dist.kernels.common.tiles import (
    gathered_tile,
    shard_in_arrival_order,
    tile_in_group,
)
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


@gluon.jit
def _place_of_tile(
    tile, tiles_m, tiles_n, rank, num_ranks, GATHERED: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    GROUP_SIZE_SHARDS: gl.constexpr,
):  # fmt: skip
    """(shard, m, n) of the ``tile``-th tile: those of the own shard, then those of the others."""
    position = tile * 0
    if not GATHERED or tile < tiles_m * tiles_n:
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
    else:
        position, m, n = gathered_tile(
            tile - tiles_m * tiles_n, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS, GROUP_SIZE_M
        )
    return shard_in_arrival_order(position, rank, num_ranks), m, n


@gluon.jit
def _produce(
    own_ptr, gathered_ptr, b_ptr, arrivals_ptr, epoch_ptr, a_ring, b_ring, full, empty, M, N, K,
    stride_b, rank, num_ranks, chunk_rows, GATHERED: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
    FLAGS_PER_RANK: gl.constexpr, NUM_SMS: gl.constexpr, BLOCK_SIZE_N: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr, GROUP_SIZE_SHARDS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The producer warp. Own and gathered shards have a loop each: the second descriptor is made
    while consumers are busy with the ring, not before the first load."""
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    rows = M // num_ranks
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tiles = tiles_per_shard * num_ranks
    whole = tiles // NUM_SMS * NUM_SMS  # those of full waves
    own_units = units_of_tiles(tiles_per_shard, whole, SPLIT_K)

    own_desc = tma.make_tensor_descriptor(
        own_ptr, [rows, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K], a_ring.layout
    )
    b_desc = describe_b(b_ptr, N, K, stride_b, b_ring, B_COLUMN_MAJOR)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for unit in range(gl.program_id(0), own_units, NUM_SMS):
        tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        first_step, end_step = steps_of_part(K, part, num_parts, BLOCK_SIZE_K)
        stage, phase = load_tile(
            own_desc, b_desc, a_ring, b_ring, full, empty, stage, phase,
            m * BLOCK_SIZE_M, n * BLOCK_SIZE_N, first_step, end_step, B_COLUMN_MAJOR,
        )  # fmt: skip

    if GATHERED:
        gathered_desc = tma.make_tensor_descriptor(
            gathered_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K], a_ring.layout
        )
        taken = gl.cdiv(own_units, NUM_SMS) * NUM_SMS
        skipped = taken - own_units  # programs that had no unit in the last wave of the own shard
        first = own_units + (gl.program_id(0) + skipped) % NUM_SMS
        for unit in range(first, units_of_tiles(tiles, whole, SPLIT_K), NUM_SMS):
            tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
            position, m, n = gathered_tile(
                tile - tiles_per_shard, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS, GROUP_SIZE_M
            )
            shard = shard_in_arrival_order(position, rank, num_ranks)
            row = m * BLOCK_SIZE_M
            last_row = min(row + BLOCK_SIZE_M, rows) - 1
            token = wait_for_rows(
                arrivals_ptr, epoch_ptr, shard, row, last_row, chunk_rows, FLAGS_PER_RANK
            )
            first_step, end_step = steps_of_part(K, part, num_parts, BLOCK_SIZE_K)
            stage, phase = load_tile(
                gathered_desc, b_desc, a_ring, b_ring, full, empty, stage, phase,
                dl.consume_token(shard * rows + row, token), n * BLOCK_SIZE_N, first_step, end_step,
                B_COLUMN_MAJOR,
            )  # fmt: skip


@gluon.jit
def _consume(
    GROUP: gl.constexpr, c_ptr, partials_ptr, counters_ptr, a_ring, b_ring, staging, full, empty, M,
    N, K, rank, num_ranks, GATHERED: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
    NUM_SMS: gl.constexpr, BLOCK_SIZE_N: gl.constexpr, GROUP_SIZE_M: gl.constexpr,
    EPILOGUE_SUBTILE: gl.constexpr, GROUP_SIZE_SHARDS: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """The ``GROUP``-th group of consumer warps: the same units in the same order as the
    producer."""
    BLOCK_SIZE_M: gl.constexpr = a_ring.shape[1]
    BLOCK_SIZE_K: gl.constexpr = a_ring.shape[2]
    HALF_M: gl.constexpr = BLOCK_SIZE_M // 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_SIZE_N, 16]
    )
    rows = M // num_ranks
    tiles_m = gl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = gl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tiles = tiles_per_shard * num_ranks
    whole = tiles // NUM_SMS * NUM_SMS  # those of full waves
    c_desc = tma.make_tensor_descriptor(
        c_ptr,
        [num_ranks, rows, N],
        [rows.to(gl.int64) * N, N, 1],
        [1, HALF_M, staging.shape[3]],
        staging.layout,
    )
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for unit in range(gl.program_id(0), units_of_tiles(tiles, whole, SPLIT_K), NUM_SMS):
        tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
        shard, m, n = _place_of_tile(
            tile, tiles_m, tiles_n, rank, num_ranks, GATHERED, GROUP_SIZE_M, GROUP_SIZE_SHARDS
        )
        first_step, end_step = steps_of_part(K, part, num_parts, BLOCK_SIZE_K)
        accumulator, stage, phase = multiply_half(
            GROUP, a_ring, b_ring, full, empty, stage, phase, end_step - first_step,
            B_COLUMN_MAJOR, LAYOUT,
        )  # fmt: skip
        is_complete = True
        if SPLIT_K > 1:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
            if num_parts > 1:
                is_complete, accumulator = finish_part(
                    GROUP, accumulator, partials_ptr, counters_ptr, tile - whole, part, SPLIT_K
                )
        if is_complete:
            store_half(
                c_desc, accumulator, staging.index(GROUP), shard,
                m * BLOCK_SIZE_M + GROUP * HALF_M, n * BLOCK_SIZE_N, EPILOGUE_SUBTILE,
            )  # fmt: skip
    tma.store_wait(0)  # shared memory is to stay until it is read


@gluon.jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_warp_specialized(
    own_ptr,
    gathered_ptr,
    b_ptr,
    c_ptr,
    arrivals_ptr,
    epoch_ptr,
    M,
    N,
    K,
    stride_b,
    rank,
    num_ranks,
    chunk_rows,
    GATHERED: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    FLAGS_PER_RANK: gl.constexpr,
    NUM_SMS: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    BLOCK_SIZE_M: gl.constexpr,
    BLOCK_SIZE_N: gl.constexpr,
    BLOCK_SIZE_K: gl.constexpr,
    GROUP_SIZE_M: gl.constexpr,
    EPILOGUE_SUBTILE: gl.constexpr,
    GROUP_SIZE_SHARDS: gl.constexpr = 1,
    SPLIT_K: gl.constexpr = 1,
    partials_ptr=None,
    counters_ptr=None,
):
    """As ``kernel_gemm_persistent``, of 16-bit operands; launched with 4 warps, those of a group.

    BLOCK_SIZE_M is 128 or 256, at least 64 rows for each group; rows of a tile that lies in shared
    memory are multiples of 128 bytes.
    """
    a_ring, b_ring, staging, full, empty = allocate_ring(
        c_ptr.dtype.element_ty, NUM_STAGES, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        B_COLUMN_MAJOR, EPILOGUE_SUBTILE,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (
                0, c_ptr, partials_ptr, counters_ptr, a_ring, b_ring, staging, full, empty,
                M, N, K, rank, num_ranks, GATHERED, B_COLUMN_MAJOR, NUM_SMS, BLOCK_SIZE_N,
                GROUP_SIZE_M, EPILOGUE_SUBTILE, GROUP_SIZE_SHARDS, SPLIT_K,
            )),
            (_consume, (
                1, c_ptr, partials_ptr, counters_ptr, a_ring, b_ring, staging, full, empty,
                M, N, K, rank, num_ranks, GATHERED, B_COLUMN_MAJOR, NUM_SMS, BLOCK_SIZE_N,
                GROUP_SIZE_M, EPILOGUE_SUBTILE, GROUP_SIZE_SHARDS, SPLIT_K,
            )),
            (_produce, (
                own_ptr, gathered_ptr, b_ptr, arrivals_ptr, epoch_ptr, a_ring, b_ring, full, empty,
                M, N, K, stride_b, rank, num_ranks, chunk_rows, GATHERED, B_COLUMN_MAJOR,
                FLAGS_PER_RANK, NUM_SMS, BLOCK_SIZE_N, GROUP_SIZE_M, GROUP_SIZE_SHARDS, SPLIT_K,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
