"""GEMM over an A whose rows come in shards, one of each rank; with one shard, a plain GEMM.

``C[M, N] = A[M, K] @ B[K, N]`` with fp32 accumulation. A consists of ``num_ranks`` shards of
``M / num_ranks`` rows. The own shard is read where it lies (``own_ptr``) and computed first; the
others are read from ``gathered_ptr`` [M, K] in the order in which producers deliver them, each
after its flags.

Tiles never straddle two shards, so a tile has one source and any number of rows a shard works: the
last tile of a shard is clipped on store by a 3-D descriptor [rank, row, column] (costs nothing over
a 2-D
one: same registers, shared memory and instructions for sm_90) or by a mask.

Flags of shard s are ``arrivals_ptr[s * FLAGS_PER_RANK + c]``, one for each ``chunk_rows`` rows; a
chunk is there when its flag has reached the epoch at ``epoch_ptr``.

Where tiles are too few to fill the GPU's last wave, or all of it, the persistent kernel cuts them
along K (``split_k.py``).
"""

from __future__ import annotations

import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.split_k import (
    part_of_unit,
    publish_partial,
    sum_of_partials,
    units_of_tiles,
)
from triton_dist.kernels.common.tiles import (
    gathered_tile,
    shard_in_arrival_order,
    tile_in_group,
)


@jit
def wait_for_rows(
    arrivals_ptr, epoch_ptr, shard, first_row, last_row, chunk_rows, FLAGS_PER_RANK: tl.constexpr
):
    """Wait until rows ``first_row`` to ``last_row`` of ``shard`` are gathered; gives a token."""
    first = first_row // chunk_rows
    count = last_row // chunk_rows - first + 1
    flags_ptr = arrivals_ptr + shard * FLAGS_PER_RANK + first
    return dl.wait(flags_ptr, count, tl.load(epoch_ptr), epoch_ptr + 1)


@jit
def multiply_tile(
    a_desc,
    b_desc,
    row,
    column,
    K,
    part,
    num_parts,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """fp32 [BLOCK_SIZE_M, BLOCK_SIZE_N] product of rows from ``row`` and columns from ``column``
    on, over the ``part``-th of ``num_parts`` parts of K."""
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    for step in range(steps * part // num_parts, steps * (part + 1) // num_parts):
        k = step * BLOCK_SIZE_K
        a = a_desc.load([row, k])
        if B_COLUMN_MAJOR:
            b = b_desc.load([column, k]).T
        else:
            b = b_desc.load([k, column])
        accumulator = tl.dot(a, b, accumulator, input_precision=INPUT_PRECISION)
    return accumulator


@jit
def multiply_tile_by_pointers(
    a_ptr,
    b_ptr,
    row,
    rows_left,
    column,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """The same for any strides: the first ``rows_left`` rows from ``row`` on are read."""
    local_row = tl.arange(0, BLOCK_SIZE_M)
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    k_index = tl.arange(0, BLOCK_SIZE_K)
    row_mask = local_row < rows_left
    column_mask = column_index < N
    a_rows = (row + local_row).to(tl.int64)
    a_block = a_ptr + a_rows[:, None] * stride_am + k_index[None, :] * stride_ak
    b_block = b_ptr + k_index[:, None] * stride_bk + column_index[None, :].to(tl.int64) * stride_bn
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_SIZE_K)):
        k_mask = k_index < K - step * BLOCK_SIZE_K
        a = tl.load(a_block, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        b = tl.load(b_block, mask=k_mask[:, None] & column_mask[None, :], other=0.0)
        accumulator = tl.dot(a, b, accumulator, input_precision=INPUT_PRECISION)
        a_block += BLOCK_SIZE_K * stride_ak
        b_block += BLOCK_SIZE_K * stride_bk
    return accumulator


@jit
def store_tile(
    c_desc,
    accumulator,
    shard,
    row,
    column,
    EPILOGUE_SUBTILE: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Convert and store a tile of C; in two halves when ``EPILOGUE_SUBTILE``, for half the
    staging memory."""
    if EPILOGUE_SUBTILE:
        halves = tl.permute(
            tl.reshape(accumulator, (BLOCK_SIZE_M, 2, BLOCK_SIZE_N // 2)), (0, 2, 1)
        )
        left, right = tl.split(halves)
        left = tl.reshape(left.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N // 2))
        c_desc.store([shard, row, column], left)
        right = tl.reshape(right.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N // 2))
        c_desc.store([shard, row, column + BLOCK_SIZE_N // 2], right)
    else:
        c_desc.store(
            [shard, row, column],
            tl.reshape(accumulator.to(c_desc.dtype), (1, BLOCK_SIZE_M, BLOCK_SIZE_N)),
        )


@jit
def finish_tile(
    c_desc,
    accumulator,
    shard,
    row,
    column,
    partials_ptr,
    counters_ptr,
    split_tile,
    part,
    num_parts,
    EPILOGUE_SUBTILE: tl.constexpr,
    SPLIT_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
):
    """Store a tile of C; one that is cut along K only by the program that finishes its last
    part."""
    is_complete = True
    if SPLIT_K > 1:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
        if num_parts > 1:
            is_complete = publish_partial(
                accumulator, partials_ptr, counters_ptr, split_tile, part, SPLIT_K, NUM_WARPS
            )
            if is_complete:
                accumulator = sum_of_partials(
                    partials_ptr, split_tile, SPLIT_K, NUM_WARPS, BLOCK_SIZE_M, BLOCK_SIZE_N
                )
    if is_complete:
        store_tile(
            c_desc, accumulator, shard, row, column, EPILOGUE_SUBTILE, BLOCK_SIZE_M, BLOCK_SIZE_N
        )


@jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_persistent(
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
    GATHERED: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
    NUM_SMS: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    GROUP_SIZE_SHARDS: tl.constexpr = 1,
    SPLIT_K: tl.constexpr = 1,
    SPLIT_TAIL_ONLY: tl.constexpr = False,
    NUM_WARPS: tl.constexpr = 4,
    partials_ptr=None,
    counters_ptr=None,
    HALVE_LAST_WAVE: tl.constexpr = False,
):
    """Persistent kernel on tensor descriptors (TMA from sm_90 on); grid (min(NUM_SMS, units),).

    A unit of work is a tile, or one of its ``SPLIT_K`` parts. Two loops over units, own shard and
    gathered shards, because the K loop has to read from one descriptor to be pipelined; the second
    goes on with the program after the one that had the last unit of the first. Loops stay nested:
    flattened with a wait inside they lose their pipelining (622 -> 2201 us, H200).

    ``partials_ptr``, ``counters_ptr``, ``NUM_WARPS``: of a ``SPLIT_K`` above 1 only.
    """
    rows = M // num_ranks
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    store_n: tl.constexpr = BLOCK_SIZE_N // 2 if EPILOGUE_SUBTILE else BLOCK_SIZE_N
    tiles = tiles_per_shard * num_ranks
    whole = tiles
    if SPLIT_K > 1:
        whole = tiles // NUM_SMS * NUM_SMS if SPLIT_TAIL_ONLY else 0
    # Tiles of the last wave, where half of the programs would have none, are halved along N.
    halved = 0
    if HALVE_LAST_WAVE:
        last_wave = tiles % NUM_SMS
        halved = tl.where(last_wave * 2 <= NUM_SMS, min(last_wave, tiles - tiles_per_shard), 0)
    own_units = units_of_tiles(tiles_per_shard, whole, SPLIT_K)

    own_desc = tl.make_tensor_descriptor(own_ptr, [rows, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K])
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

    for unit in range(tl.program_id(0), own_units, NUM_SMS):
        tile, part, num_parts = part_of_unit(unit, whole, SPLIT_K)
        m, n = tile_in_group(tile, tiles_m, tiles_n, GROUP_SIZE_M)
        accumulator = multiply_tile(
            own_desc, b_desc, m * BLOCK_SIZE_M, n * BLOCK_SIZE_N, K, part, num_parts,
            B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
        )  # fmt: skip
        finish_tile(
            c_desc, accumulator, rank, m * BLOCK_SIZE_M, n * BLOCK_SIZE_N,
            partials_ptr, counters_ptr, tile - whole, part, num_parts,
            EPILOGUE_SUBTILE, SPLIT_K, NUM_WARPS, BLOCK_SIZE_M, BLOCK_SIZE_N,
        )  # fmt: skip

    if GATHERED:
        gathered_desc = tl.make_tensor_descriptor(
            gathered_ptr, [M, K], [K, 1], [BLOCK_SIZE_M, BLOCK_SIZE_K]
        )
        taken = tl.cdiv(own_units, NUM_SMS) * NUM_SMS
        skipped = taken - own_units  # programs that had no unit in the last wave of the own shard
        first = own_units + (tl.program_id(0) + skipped) % NUM_SMS
        for unit in range(first, units_of_tiles(tiles - halved, whole, SPLIT_K), NUM_SMS):
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
            accumulator = multiply_tile(
                gathered_desc, b_desc, dl.consume_token(shard * rows + row, token), n *
                BLOCK_SIZE_N, K, part, num_parts, B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M,
                BLOCK_SIZE_N, BLOCK_SIZE_K,
            )  # fmt: skip
            finish_tile(
                c_desc, accumulator, shard, row, n * BLOCK_SIZE_N,
                partials_ptr, counters_ptr, tile - whole, part, num_parts,
                EPILOGUE_SUBTILE, SPLIT_K, NUM_WARPS, BLOCK_SIZE_M, BLOCK_SIZE_N,
            )  # fmt: skip

        if HALVE_LAST_WAVE:
            half_n: tl.constexpr = BLOCK_SIZE_N // 2
            if B_COLUMN_MAJOR:
                b_half_desc = tl.make_tensor_descriptor(
                    b_ptr, [N, K], [stride_b, 1], [half_n, BLOCK_SIZE_K]
                )
            else:
                b_half_desc = tl.make_tensor_descriptor(
                    b_ptr, [K, N], [stride_b, 1], [BLOCK_SIZE_K, half_n]
                )
            c_half_desc = tl.make_tensor_descriptor(
                c_ptr, [num_ranks, rows, N], [rows.to(tl.int64) * N, N, 1],
                [1, BLOCK_SIZE_M, half_n],
            )  # fmt: skip
            taken = (tiles - halved) % NUM_SMS
            start = (tl.program_id(0) + NUM_SMS - taken) % NUM_SMS
            for half in range(start, halved * 2, NUM_SMS):
                tile = tiles - halved + half // 2
                position, m, n = gathered_tile(
                    tile - tiles_per_shard, num_ranks, tiles_m, tiles_n, GROUP_SIZE_SHARDS,
                    GROUP_SIZE_M,
                )  # fmt: skip
                shard = shard_in_arrival_order(position, rank, num_ranks)
                row = m * BLOCK_SIZE_M
                column = n * BLOCK_SIZE_N + half % 2 * half_n
                last_row = min(row + BLOCK_SIZE_M, rows) - 1
                token = wait_for_rows(
                    arrivals_ptr, epoch_ptr, shard, row, last_row, chunk_rows, FLAGS_PER_RANK
                )
                accumulator = multiply_tile(
                    gathered_desc, b_half_desc, dl.consume_token(shard * rows + row, token),
                    column, K, 0, 1, B_COLUMN_MAJOR, INPUT_PRECISION, BLOCK_SIZE_M, half_n,
                    BLOCK_SIZE_K,
                )  # fmt: skip
                store_tile(
                    c_half_desc, accumulator, shard, row, column, False, BLOCK_SIZE_M, half_n
                )


@jit(do_not_specialize=["rank", "num_ranks", "chunk_rows"])
def kernel_gemm_non_persistent(
    own_ptr,
    gathered_ptr,
    b_ptr,
    c_ptr,
    arrivals_ptr,
    epoch_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    rank,
    num_ranks,
    chunk_rows,
    GATHERED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    FLAGS_PER_RANK: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """One tile a program on pointers, for any strides; grid (tiles,). C is contiguous.

    Programs start in order of their number on all GPUs so far, so those that wait for gathered
    shards come after those of the own shard; and whatever they wait for needs no SM.
    """
    rows = M // num_ranks
    tiles_m = tl.cdiv(rows, BLOCK_SIZE_M)
    tiles_n = tl.cdiv(N, BLOCK_SIZE_N)
    tiles_per_shard = tiles_m * tiles_n
    tile = tl.program_id(0)
    shard = shard_in_arrival_order(tile // tiles_per_shard, rank, num_ranks)
    m, n = tile_in_group(tile % tiles_per_shard, tiles_m, tiles_n, GROUP_SIZE_M)

    row = m * BLOCK_SIZE_M
    a_ptr = own_ptr
    a_row = row
    if GATHERED:  # noqa: SIM102  # a constexpr: not to be joined with the runtime condition
        if shard != rank:
            last_row = min(row + BLOCK_SIZE_M, rows) - 1
            token = wait_for_rows(
                arrivals_ptr, epoch_ptr, shard, row, last_row, chunk_rows, FLAGS_PER_RANK
            )
            a_ptr = gathered_ptr + shard.to(tl.int64) * rows * stride_am
            a_row = dl.consume_token(
                row, token
            )  # not on the pointer, whose known alignment it would hide

    accumulator = multiply_tile_by_pointers(
        a_ptr, b_ptr, a_row, rows - row, n * BLOCK_SIZE_N, N, K,
        stride_am, stride_ak, stride_bk, stride_bn,
        INPUT_PRECISION, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K,
    )  # fmt: skip

    row_index = row + tl.arange(0, BLOCK_SIZE_M)
    column_index = n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    row_mask = row_index < rows
    column_mask = column_index < N
    c_rows = shard.to(tl.int64) * rows + row_index
    c_block = c_ptr + c_rows[:, None] * N + column_index[None, :]
    tl.store(
        c_block,
        accumulator.to(c_ptr.dtype.element_ty),
        mask=row_mask[:, None] & column_mask[None, :],
    )
