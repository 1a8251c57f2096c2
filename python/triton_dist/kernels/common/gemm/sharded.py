"""GEMM kernels for an A that consists of shards, one per rank. With one shard, a plain GEMM.

``C[M, N] = A[M, K] @ B[K, N]`` with fp32 accumulation. A has ``num_ranks`` shards of ``M /
num_ranks`` rows. This rank's shard is read from ``local_ptr`` and multiplied first. The shards of
other ranks are read from ``shards.rows`` [M, K] in order of arrival. Each of their tiles first
waits until its rows have arrived.

No tile has rows of two shards, so a tile has one source, and shards may have any number of rows.
The last tile of a shard is clipped on store, by a mask or by a 3-D descriptor [rank, row, column].
For sm_90 the 3-D descriptor needs as many registers, shared memory and instructions as a 2-D
descriptor.

Flag ``shards.arrivals[s * FLAGS_PER_RANK + c]`` covers chunk c of shard s; a chunk has
``chunk_rows`` rows. The chunk has arrived when the flag reaches the epoch at ``shards.epoch``. The
lowest 20 bits of a flag hold the number of rows of a shard, which must be equal on all ranks
(``common/peers.py``). ``gemm/work_items.py`` describes fused push (``NUM_COMM_SMS``) and split-K.
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import add_bias, scales_of_shard
from triton_dist.kernels.common.gemm.tile import (
    multiply_tile,
    multiply_tile_by_pointers,
    shard_in_arrival_order,
    store_tile,
    tile_in_group,
)
from triton_dist.kernels.common.gemm.work_items import (
    multiply_arriving_tile,
    publish_partial,
    push_local_shard,
    split_of_work_item,
    sum_of_partials,
    work_items_of_tiles,
)
from triton_dist.kernels.common.peers import flag_of, timeout_word_of


@jit
def gathered_tile(
    tile,
    num_ranks,
    num_tiles_m,
    num_tiles_n,
    GROUP_SIZE_SHARDS: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Return (position of the shard in order of arrival, m, n) of a tile of the gathered shards.

    ``GROUP_SIZE_SHARDS`` consecutive shards are traversed as one taller shard, because each
    traversal of a shard reads all of B. Position 0 is this rank's shard.
    """
    if GROUP_SIZE_SHARDS == 1:
        m, n = tile_in_group(
            tile % (num_tiles_m * num_tiles_n), num_tiles_m, num_tiles_n, GROUP_SIZE_M
        )
        return 1 + tile // (num_tiles_m * num_tiles_n), m, n
    else:
        width = GROUP_SIZE_SHARDS * num_tiles_m * num_tiles_n
        first = tile // width * GROUP_SIZE_SHARDS
        shards = min(num_ranks - 1 - first, GROUP_SIZE_SHARDS)
        row, n = tile_in_group(tile % width, shards * num_tiles_m, num_tiles_n, GROUP_SIZE_M)
        return 1 + first + row // num_tiles_m, row % num_tiles_m, n


@jit
def wait_for_rows(shards, shard, first_row, last_row, chunk_rows, FLAGS_PER_RANK: tl.constexpr):
    """Wait for rows ``first_row`` to ``last_row`` of a shard; return a wait token.

    A peer sets its flags to its epoch word (epoch and call tag, ``common/peers.py``). The wait
    compares both with this rank's epoch word.
    """
    first = first_row // chunk_rows
    count = last_row // chunk_rows - first + 1
    flags_ptr = shards.arrivals + shard * FLAGS_PER_RANK + first
    return dl.wait(flags_ptr, count, tl.load(shards.epoch), timeout_word_of(shards.epoch), True)


@jit
def finish_tile(
    c_desc,
    accumulator,
    shard,
    row,
    column,
    partials,
    split_tile,
    split,
    num_splits,
    scales,
    N,
    SCALING: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Store a tile of C. If it is split along K, only the program that finishes last stores it."""
    is_complete = True
    if SPLIT_K > 1:  # noqa: SIM102  # constexpr and runtime conditions stay apart
        if num_splits > 1:
            is_complete = publish_partial(
                accumulator, partials, split_tile, split, SPLIT_K, NUM_WARPS
            )
            if is_complete:
                accumulator = sum_of_partials(
                    accumulator, partials, split_tile, split, SPLIT_K, NUM_WARPS
                )
    if is_complete:
        accumulator = add_bias(accumulator, scales, column, N, SCALING)
        store_tile(
            c_desc, accumulator, shard, row, column, EPILOGUE_SUBTILE, BLOCK_SIZE_M, BLOCK_SIZE_N
        )


@jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_persistent(
    local_ptr,
    shards,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_b,
    rank,
    num_ranks,
    chunk_rows,
    gemm_plan: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    GROUP_SIZE_SHARDS: tl.constexpr = 1,
    SPLIT_K: tl.constexpr = 1,
    partials=None,
):
    """Compute C with tensor descriptors (TMA from sm_90 on).

    Grid (min(NUM_SMS, work items + NUM_COMM_SMS),). A work item is a tile, or one of ``SPLIT_K``
    splits of a tile in a last wave that is not full. ``partials`` is required for ``SPLIT_K`` above
    1. This rank's shard and the gathered shards have separate loops, because a K loop must read
    from one descriptor to be pipelined. The loops over work items and over K stay nested. Flattened
    into one loop that contains a wait, they are not pipelined (2201 instead of 622 us, H200).
    """
    PRECISION: tl.constexpr = gemm_plan.PRECISION
    B_COLUMN_MAJOR: tl.constexpr = gemm_plan.B_COLUMN_MAJOR
    NUM_SMS: tl.constexpr = gemm_plan.NUM_SMS
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    SCALING: tl.constexpr = gemm_plan.SCALING
    NUM_WARPS: tl.constexpr = gemm_plan.NUM_WARPS
    rows = M // num_ranks
    program = tl.program_id(0)
    if NUM_COMM_SMS > 0:
        if program < NUM_COMM_SMS:
            push_local_shard(
                local_ptr, shards, rows, K, rank, num_ranks, gemm_plan, BLOCK_SIZE_K, True
            )
        # Rotate the program numbers, so that programs that send take the last work items of a wave.
        program = (program + NUM_SMS - NUM_COMM_SMS) % NUM_SMS
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    store_n: tl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE else BLOCK_SIZE_N
    tiles = tiles_per_shard * num_ranks
    unsplit_tiles = tiles // NUM_SMS * NUM_SMS  # tiles of full waves
    local_work_items = work_items_of_tiles(tiles_per_shard, unsplit_tiles, SPLIT_K)

    local_desc = tl.make_tensor_descriptor(
        local_ptr, [rows, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K]
    )
    if B_COLUMN_MAJOR:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [N, K], [stride_b, 1], [BLOCK_SIZE_N, BLOCK_SIZE_K]
        )
    else:
        b_desc = tl.make_tensor_descriptor(
            b_ptr, [K, N], [stride_b, 1], [BLOCK_SIZE_K, BLOCK_SIZE_N]
        )
    c_desc = tl.make_tensor_descriptor(
        c_ptr, [num_ranks, rows, N], [rows.to(tl.int64) * N, N, 1], [1, BLOCK_SIZE_M, store_n]
    )

    for work_item in range(program, local_work_items, NUM_SMS):
        tile, split, num_splits = split_of_work_item(work_item, unsplit_tiles, SPLIT_K)
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        accumulator = multiply_tile(
            local_desc, b_desc, m * BLOCK_SIZE_M, n * BLOCK_SIZE_N, K, split, num_splits,
            B_COLUMN_MAJOR, PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
            shards, scales_of_shard(shards, None, SCALING), m * BLOCK_SIZE_M, rows,
            N, SCALING,
        )  # fmt: skip
        finish_tile(
            c_desc, accumulator, rank, m * BLOCK_SIZE_M, n * BLOCK_SIZE_N,
            partials, tile - unsplit_tiles, split, num_splits, shards, N, SCALING,
            EPILOGUE_SUBTILE, SPLIT_K, NUM_WARPS, BLOCK_SIZE_M, BLOCK_SIZE_N,
        )  # fmt: skip

    if gemm_plan.GATHERED:
        gathered_desc = tl.make_tensor_descriptor(
            shards.rows, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K]
        )
        local_waves_end = tl.cdiv(local_work_items, NUM_SMS) * NUM_SMS
        # Programs without a work item in the last wave of this rank's shard take the next ones.
        idle_programs = local_waves_end - local_work_items
        first = local_work_items + (program + idle_programs) % NUM_SMS
        for work_item in range(first, work_items_of_tiles(tiles, unsplit_tiles, SPLIT_K), NUM_SMS):
            tile, split, num_splits = split_of_work_item(work_item, unsplit_tiles, SPLIT_K)
            position, m, n = gathered_tile(
                tile - tiles_per_shard, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS, GROUP_SIZE_M
            )
            shard = shard_in_arrival_order(position, rank, num_ranks)
            row = m * BLOCK_SIZE_M
            if NUM_COMM_SMS > 0:
                accumulator = multiply_arriving_tile(
                    gathered_desc, b_desc, shards, shard, rows, row, n * BLOCK_SIZE_N, K, split,
                    num_splits, gemm_plan, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
                )  # fmt: skip
            else:
                last_row = min(row + BLOCK_SIZE_M, rows) - 1
                token = wait_for_rows(
                    shards, shard, row, last_row, chunk_rows, gemm_plan.FLAGS_PER_RANK
                )
                accumulator = multiply_tile(
                    dl.only_rows(gathered_desc, shard * rows, shard * rows + last_row + 1), b_desc,
                    dl.consume_token(shard * rows + row, token), n * BLOCK_SIZE_N, K, split,
                    num_splits, B_COLUMN_MAJOR, PRECISION,
                    BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
                    shards, scales_of_shard(shards, shard, SCALING),
                    dl.consume_token(row, token), rows, N, SCALING,
                )  # fmt: skip
            finish_tile(
                c_desc, accumulator, shard, row, n * BLOCK_SIZE_N,
                partials, tile - unsplit_tiles, split, num_splits, shards, N, SCALING,
                EPILOGUE_SUBTILE, SPLIT_K, NUM_WARPS, BLOCK_SIZE_M, BLOCK_SIZE_N,
            )  # fmt: skip


@jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_non_persistent(
    local_ptr,
    shards,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    strides,
    rank,
    num_ranks,
    chunk_rows,
    gemm_plan: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Compute one tile per program through pointers, for any strides. Grid (tiles + NUM_COMM_SMS,).

    C is contiguous. All current GPUs start programs in the order of their numbers. Programs that
    push this rank's shard have the lowest numbers, programs that wait for gathered shards the
    highest. A waiting program therefore never keeps a pushing program from starting.
    """
    PRECISION: tl.constexpr = gemm_plan.PRECISION
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    SCALING: tl.constexpr = gemm_plan.SCALING
    rows = M // num_ranks
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tile = tl.program_id(0) - NUM_COMM_SMS
    if NUM_COMM_SMS > 0:  # noqa: SIM102  # constexpr and runtime conditions stay apart
        if tile < 0:
            push_local_shard(
                local_ptr, shards, rows, K, rank, num_ranks, gemm_plan, BLOCK_SIZE_K, False
            )
            return
    shard = shard_in_arrival_order(tile // tiles_per_shard, rank, num_ranks)
    m, n = tile_in_group(tile % tiles_per_shard, tiles_m, tiles_n, GROUP_SIZE_M)

    row = m * BLOCK_SIZE_M
    a_ptr = local_ptr
    a_scale_ptr = scales_of_shard(shards, None, SCALING)
    a_row = row
    if gemm_plan.GATHERED:  # noqa: SIM102  # constexpr and runtime conditions stay apart
        if shard != rank:
            # A program waits once. With fused push, it waits for all chunks of the shard along K,
            # otherwise for the chunks that contain its rows.
            if NUM_COMM_SMS > 0:
                flags_ptr = shards.arrivals + shard * gemm_plan.FLAGS_PER_RANK
                value = flag_of(shards.epoch, rows)
                flags = gemm_plan.NUM_CHUNKS * NUM_COMM_SMS
                token = dl.wait(flags_ptr, flags, value, timeout_word_of(shards.epoch), True)
            else:
                last_row = min(row + BLOCK_SIZE_M, rows) - 1
                token = wait_for_rows(
                    shards, shard, row, last_row, chunk_rows, gemm_plan.FLAGS_PER_RANK
                )
            a_ptr = shards.rows + shard.to(tl.int64) * rows * strides.am
            a_scale_ptr = scales_of_shard(shards, shard, SCALING)
            # Add the token to the row. Added to the pointer, it would hide the pointer's alignment.
            a_row = dl.consume_token(row, token)

    accumulator = multiply_tile_by_pointers(
        a_ptr, b_ptr, a_row, rows - row, n * BLOCK_SIZE_N, N, K,
        strides.am, strides.ak, strides.bk, strides.bn,
        PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, gemm_plan.INT64_OFFSETS,
        shards, a_scale_ptr, a_row, SCALING,
    )  # fmt: skip
    accumulator = add_bias(accumulator, shards, n * BLOCK_SIZE_N, N, SCALING)

    row_index = row + tl.arange(0, BLOCK_SIZE_M)
    column_index = n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    row_mask = row_index < rows
    column_mask = column_index < N
    c_rows = shard.to(tl.int64) * rows + row_index
    c_block = c_ptr + c_rows[:, None] * N + column_index[None, :]
    with dl.mark("store"):
        tl.store(
            c_block,
            accumulator.to(c_ptr.dtype.element_ty),
            mask=row_mask[:, None] & column_mask[None, :],
        )
