"""GEMM kernels for an A that consists of shards, one per rank. With one shard, a plain GEMM.

``C[M, N] = A[M, K] @ B[K, N]`` with fp32 accumulation. A has ``num_ranks`` shards of ``M /
num_ranks`` rows. This rank's shard is read from ``local_ptr`` and multiplied first. The shards of
other ranks are read from ``shards.rows`` [M, K] in order of arrival. Each of their tiles first
waits until its rows have arrived.

No tile has rows of two shards, so a tile has one source, and shards may have any number of rows.
The last tile of a shard is clipped on store, by a mask or by a 3-D descriptor [rank, row, column].
On sm_90 a 3-D descriptor costs no more registers, shared memory or instructions than a 2-D one.

Flag ``shards.arrivals[s * FLAGS_PER_RANK + c]`` covers chunk c of shard s; a chunk has
``chunk_rows`` rows. The chunk has arrived when the flag reaches the epoch at ``shards.epoch``. The
lowest 20 bits of a flag hold the number of rows of a shard, which must be equal on all ranks
(``common/peers.py``).

A work item is a tile of the output or, with split-K, the product of a tile over a part of K.

*Fused push.* Copy engines take a few microseconds per copy, and a tile that waits for whole rows
starts only after their last byte. For small shards, such waits are most of a call's time. With
fused push, the first NUM_COMM_SMS programs send this rank's shard to all peers, in chunks
along K. A tile multiplies the first chunk while the next chunks are sent. The widths of the chunks
have the ratio 1 : 2 : 3 …, so the first chunk arrives early although there are few flags. Each
sending program sets its own flag, because its release covers only its own stores. Flags of shard
s are ``[s * FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program]``.

Sending cannot deadlock. Senders wait only until the peers have *consumed* the previous contents of
the slot (memory of the gathered rows), which kernels of earlier calls report. Senders multiply only
after they have sent everything. Their program numbers are low, so they get SMs before any program
that waits for shards. Other streams must leave at least NUM_COMM_SMS SMs free.

*Split-K.* If the last wave is not full, its tiles are split along K over several programs. Each
program stores its fp32 *partial* product in a workspace and increments the tile's counter. The
program that increments last adds the partials in the order of K, so the result is deterministic,
and resets the counter for the next launch. No program waits, so the programs of a tile need not run
at the same time.

A partial is stored in the register order of a Hopper accumulator. With wgmma a warp holds 16 rows,
and a thread holds 2 adjacent columns of every 8, in 2 rows. Each thread can therefore store and
load 16 bytes in full cache lines without shared memory, which the pipeline stages occupy. Other
devices can use any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import add_bias, scales_of_shard
from triton_dist.kernels.common.gemm.tile import (
    multiply_steps,
    multiply_tile,
    multiply_tile_by_pointers,
    shard_in_arrival_order,
    store_tile,
    tile_in_group,
)
from triton_dist.kernels.common.peers import current_flag, epoch_at, timeout_words_at


class Shards(NamedTuple):
    """Kernel argument: gathered rows [M, K] of all ranks, their flags, and the epoch of the slot.

    ``rows_table`` and ``arrivals_table`` have the addresses of the rows and flags on each rank.
    ``consumed`` has the last epoch that each peer has consumed. These three are ``None`` unless the
    kernel sends this rank's shard. ``gemm.scales.Scales`` describes the members from ``a_scale``
    on.
    """

    rows: Any
    arrivals: Any
    epoch: Any
    rows_table: Any
    arrivals_table: Any
    consumed: Any
    a_scale: Any
    b_scale: Any
    bias: Any
    stride_am: Any
    stride_ak: Any
    stride_bk: Any
    stride_bn: Any
    gathered_scales: Any
    stride_shard: Any


class SplitWorkspace(NamedTuple):
    """Memory for the partial products of split tiles, and a counter of stored partials per tile.

    Launches that share a workspace must not overlap.

    Attributes:
        partials: fp32, any content.
        counters: int32, one per split tile, all 0 between launches.
    """

    partials: Any
    counters: Any


class GEMMPlan(NamedTuple):
    """Constants of a sharded GEMM other than its tile sizes.

    Attributes:
        GATHERED: whether there are shards of other ranks.
        PRECISION: ``input_precision`` of ``tl.dot``.
        FLAGS_PER_RANK: distance between the first flags of two shards.
        NUM_COMM_SMS: number of programs that send this rank's shard, in NUM_CHUNKS chunks along K.
        NUM_WARPS: number of warps that multiply.
        NUM_STAGES: pipeline stages of the warp-specialized kernel; 0 for other kernels.
        INT64_OFFSETS: see ``multiply_tile_by_pointers``.
        SCALING: see ``gemm.scales.Scales``.
    """

    GATHERED: Any
    B_COLUMN_MAJOR: Any
    PRECISION: Any
    FLAGS_PER_RANK: Any
    NUM_SMS: Any
    NUM_COMM_SMS: Any
    NUM_CHUNKS: Any
    NUM_WARPS: Any
    NUM_STAGES: Any
    INT64_OFFSETS: Any
    SCALING: Any


# A sending program reads a block of this size once and stores it to every peer. A row of the block
# has 256 contiguous bytes; with 8 warps a thread has 64 bytes in flight.
_PUSH_BLOCK_ROWS = tl.constexpr(64)
_PUSH_BLOCK_ROW_BYTES = tl.constexpr(256)
# Number of peers whose flags a program awaits or sets at the same time.
_PEERS_PER_WAIT = tl.constexpr(16)


@jit
def first_step_of_chunk(chunk, steps, NUM_CHUNKS: tl.constexpr):
    """Return the index of the first step of ``chunk``; K has ``steps`` steps in NUM_CHUNKS chunks.

    If ``chunk`` is NUM_CHUNKS, return ``steps``.
    """
    # Sizes of chunks are proportional to 1, 2, 3, …, so first steps are triangular numbers.
    return steps * (chunk * (chunk + 1) // 2) // (NUM_CHUNKS * (NUM_CHUNKS + 1) // 2)


@jit
def wait_for_chunk(shards, shard, rows, chunk, gemm_plan: tl.constexpr):
    """Wait until ``chunk`` of ``shard`` (``rows`` rows) has arrived. Return a wait token."""
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    program = tl.arange(0, triton.next_power_of_2(NUM_COMM_SMS))
    flags_ptr = shards.arrivals + shard * gemm_plan.FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program
    value = current_flag(shards.epoch, rows)
    return dl.wait(flags_ptr, NUM_COMM_SMS, value, timeout_words_at(shards.epoch), True)


@jit
def push_local_shard(
    local_ptr,
    shards,
    rows,
    K,
    rank,
    num_ranks,
    gemm_plan: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Send this program's blocks of the shard [rows, K] to all peers, and set its flags there.

    ``ALIGNED``: rows begin at multiples of 16 bytes here and on the peers.
    """
    NUM_CHUNKS: tl.constexpr = gemm_plan.NUM_CHUNKS
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    program = tl.program_id(0)
    last_use = (epoch_at(shards.epoch) - 1).to(tl.int32)
    value = current_flag(shards.epoch, rows)
    # The last use of the slot must be consumed before its rows are overwritten.
    peers = num_ranks - 1
    for first_peer in range(0, peers, _PEERS_PER_WAIT):
        peer = (rank + 1 + first_peer + tl.arange(0, _PEERS_PER_WAIT)) % num_ranks
        dl.wait(
            shards.consumed + peer, peers - first_peer, last_use, timeout_words_at(shards.epoch)
        )

    # Elements per 16 bytes, for ``tl.multiple_of``. The hints are repeated below, because Triton
    # loses hints on arguments and results of calls.
    itemsize: tl.constexpr = local_ptr.dtype.element_ty.primitive_bitwidth // 8
    vector: tl.constexpr = 16 // itemsize if ALIGNED else 1
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    for chunk in range(NUM_CHUNKS):
        column = first_step_of_chunk(chunk, steps, NUM_CHUNKS) * BLOCK_SIZE_K
        end = first_step_of_chunk(chunk + 1, steps, NUM_CHUNKS) * BLOCK_SIZE_K
        end = tl.multiple_of(min(end, K), vector)
        with dl.mark("push"):
            _push_columns(
                local_ptr, shards, rows, K, column, end, program, rank, num_ranks, NUM_COMM_SMS,
                vector,
            )  # fmt: skip
            for first_peer in range(0, peers, _PEERS_PER_WAIT):
                step = first_peer + tl.arange(0, _PEERS_PER_WAIT)
                peer = (rank + 1 + step) % num_ranks
                flags_ptr = dl.symm_at(shards.arrivals, shards.arrivals_table, peer)
                flag = rank * gemm_plan.FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program
                dl.notify(flags_ptr + flag, value, mask=step < peers)


@jit
def _push_columns(
    local_ptr,
    shards,
    rows,
    K,
    column,
    end,
    program,
    rank,
    num_ranks,
    NUM_COMM_SMS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Send this program's blocks of the columns [``column``, ``end``) to all peers.

    These are block ``program`` and every ``NUM_COMM_SMS``-th block after it. ``VECTOR`` elements
    are accessed at a time. Peers get a block in the order in which they need this shard.
    """
    itemsize: tl.constexpr = local_ptr.dtype.element_ty.primitive_bitwidth // 8
    columns: tl.constexpr = _PUSH_BLOCK_ROW_BYTES // itemsize
    shard_begin = tl.multiple_of(rank.to(tl.int64) * rows * K, VECTOR)
    blocks_down = tl.cdiv(rows, _PUSH_BLOCK_ROWS)
    num_blocks = blocks_down * tl.cdiv(end - column, columns)
    for block in range(program, num_blocks, NUM_COMM_SMS):
        row_index = block % blocks_down * _PUSH_BLOCK_ROWS + tl.arange(0, _PUSH_BLOCK_ROWS)
        column_index = column + block // blocks_down * columns + tl.arange(0, columns)
        begin_of_row = tl.multiple_of(row_index.to(tl.int64) * K, VECTOR)
        offsets = begin_of_row[:, None] + column_index[None, :]
        mask = (row_index < rows)[:, None] & (column_index < end)[None, :]
        values = tl.load(local_ptr + offsets, mask=mask)
        for step in range(1, num_ranks):
            peer = (rank + num_ranks - step) % num_ranks
            # Not a call of ``target_at``, because a called function would lose the hint.
            peer_ptr = tl.load(shards.rows_table + peer).to(shards.rows.dtype)
            peer_ptr = tl.multiple_of(peer_ptr, VECTOR * itemsize)
            tl.store(peer_ptr + shard_begin + offsets, values, mask=mask)


@jit
def multiply_arriving_tile(
    gathered_desc,
    b_desc,
    shards,
    shard,
    rows,
    row,
    column,
    K,
    split,
    num_splits,
    gemm_plan: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
):
    """Return the product of a tile like ``multiply_tile``, but first wait for each chunk along K.

    The waits are outside the pipelined loop.
    """
    NUM_CHUNKS: tl.constexpr = gemm_plan.NUM_CHUNKS
    PRECISION: tl.constexpr = gemm_plan.PRECISION
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    gathered_desc = dl.only_rows(gathered_desc, shard * rows, (shard + 1) * rows)
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    for chunk in range(NUM_CHUNKS):
        begin = first_step_of_chunk(chunk, steps, NUM_CHUNKS)
        end = first_step_of_chunk(chunk + 1, steps, NUM_CHUNKS)
        begin = max(begin, steps * split // num_splits)
        end = min(end, steps * (split + 1) // num_splits)
        if begin < end:
            token = wait_for_chunk(shards, shard, rows, chunk, gemm_plan)
            accumulator = multiply_steps(
                accumulator, gathered_desc, b_desc, dl.consume_token(shard * rows + row, token),
                column, begin, end, gemm_plan.B_COLUMN_MAJOR, PRECISION, BLOCK_SIZE_K,
            )  # fmt: skip
    return accumulator


def workspace_size(config: triton.Config, tiles: int, num_sms: int) -> tuple[int, int]:
    """Return the (fp32 elements, counters) that a GEMM with ``tiles`` tiles needs as workspace."""
    tile = config.kwargs
    splits = tile.get("SPLIT_K", 1)
    if splits == 1:
        return 0, 0
    split_tiles = tiles % num_sms
    return split_tiles * splits * tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"], split_tiles


@jit
def work_items_of_tiles(tiles, unsplit_tiles, SPLIT_K: tl.constexpr):
    """Return the number of work items of the first ``tiles`` tiles.

    Tiles from number ``unsplit_tiles`` on are split.
    """
    if SPLIT_K == 1:
        return tiles
    else:
        return min(tiles, unsplit_tiles) + max(tiles - unsplit_tiles, 0) * SPLIT_K


@jit
def split_of_work_item(work_item, unsplit_tiles, SPLIT_K: tl.constexpr):
    """Return (tile, split, number of splits of the tile) of a work item."""
    if SPLIT_K == 1:
        return work_item, 0, 1
    else:
        excess = max(work_item - unsplit_tiles, 0)
        num_splits = tl.where(work_item < unsplit_tiles, 1, SPLIT_K)
        return min(work_item, unsplit_tiles) + excess // SPLIT_K, excess % SPLIT_K, num_splits


@jit
def _to_register_order(tile, NUM_WARPS: tl.constexpr):
    """Flatten a tile [BLOCK_SIZE_M, BLOCK_SIZE_N] to the order of the workspace."""
    block_m: tl.constexpr = tile.shape[0]
    block_n: tl.constexpr = tile.shape[1]
    warps: tl.constexpr = min(NUM_WARPS, block_m // 16)
    fragments = tl.reshape(tile, (block_m // 16 // warps, warps, 2, 8, block_n // 16, 2, 4, 2))
    return tl.reshape(tl.permute(fragments, (4, 0, 2, 1, 3, 6, 5, 7)), (block_m * block_n,))


@jit
def _to_rows(
    partial, NUM_WARPS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """Return the tile [BLOCK_SIZE_M, BLOCK_SIZE_N] of a result of ``_to_register_order``."""
    warps: tl.constexpr = min(NUM_WARPS, BLOCK_SIZE_M // 16)
    fragments = tl.reshape(
        partial, (BLOCK_SIZE_N // 16, BLOCK_SIZE_M // 16 // warps, 2, warps, 8, 4, 2, 2)
    )
    return tl.reshape(tl.permute(fragments, (1, 3, 2, 4, 0, 6, 5, 7)), (BLOCK_SIZE_M, BLOCK_SIZE_N))


@jit
def publish_partial(
    accumulator, workspace, tile, split, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """Store partial number ``split`` of a tile, and increment the tile's counter.

    ``tile`` numbers the tiles that are split. Return whether all partials of the tile are now
    stored. If they are, reset the counter to 0.
    """
    size: tl.constexpr = accumulator.shape[0] * accumulator.shape[1]
    start = (tile * SPLIT_K + split).to(tl.int64) * size
    # Use ordinary stores instead of TMA, because a release does not order TMA stores.
    block_ptr = workspace.partials + start + tl.arange(0, size)
    tl.store(block_ptr, _to_register_order(accumulator, NUM_WARPS))
    tl.debug_barrier()  # One thread issues the release, so first wait for all threads' stores.
    previous_count = tl.atomic_add(workspace.counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = previous_count == SPLIT_K - 1
    if is_last:
        tl.store(workspace.counters + tile, 0)
    return is_last


@jit
def sum_of_partials(
    accumulator, workspace, tile, split, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """Return the fp32 sum of all partials of split tile number ``tile``.

    ``accumulator`` is partial number ``split``, which is still in registers.
    """
    block_m: tl.constexpr = accumulator.shape[0]
    block_n: tl.constexpr = accumulator.shape[1]
    size: tl.constexpr = block_m * block_n
    partial_ptr = workspace.partials + tile.to(tl.int64) * (SPLIT_K * size) + tl.arange(0, size)
    # The loads bypass L1, which may hold stale partials.
    if SPLIT_K == 2:  # The order of two addends does not matter, so load only the other partial.
        other = tl.load(partial_ptr + (1 - split) * size, cache_modifier=".cg")
        return accumulator + _to_rows(other, NUM_WARPS, block_m, block_n)
    else:
        total = tl.load(partial_ptr, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            partial_ptr += size
            total += tl.load(partial_ptr, cache_modifier=".cg")
        return _to_rows(total, NUM_WARPS, block_m, block_n)


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
        tiles_per_group = GROUP_SIZE_SHARDS * num_tiles_m * num_tiles_n
        first = tile // tiles_per_group * GROUP_SIZE_SHARDS
        num_tiles_down = min(num_ranks - 1 - first, GROUP_SIZE_SHARDS) * num_tiles_m
        row, n = tile_in_group(tile % tiles_per_group, num_tiles_down, num_tiles_n, GROUP_SIZE_M)
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
    return dl.wait(flags_ptr, count, tl.load(shards.epoch), timeout_words_at(shards.epoch), True)


@jit
def finish_tile(
    c_desc,
    accumulator,
    shard,
    row,
    column,
    workspace,
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
                accumulator, workspace, split_tile, split, SPLIT_K, NUM_WARPS
            )
            if is_complete:
                accumulator = sum_of_partials(
                    accumulator, workspace, split_tile, split, SPLIT_K, NUM_WARPS
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
    workspace=None,
):
    """Compute C with tensor descriptors (TMA from sm_90 on).

    Grid (min(NUM_SMS, work items + NUM_COMM_SMS),). A work item is a tile, or one of ``SPLIT_K``
    splits of a tile in a last wave that is not full. ``workspace`` is required for ``SPLIT_K``
    above 1. This rank's shard and the gathered shards have separate loops, because a K loop must
    read from one descriptor to be pipelined. The loops over work items and over K stay nested.
    Flattened into one loop that contains a wait, they are not pipelined (2201 instead of 622 us,
    H200).
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
            workspace, tile - unsplit_tiles, split, num_splits, shards, N, SCALING,
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
                workspace, tile - unsplit_tiles, split, num_splits, shards, N, SCALING,
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
                value = current_flag(shards.epoch, rows)
                flags = gemm_plan.NUM_CHUNKS * NUM_COMM_SMS
                token = dl.wait(flags_ptr, flags, value, timeout_words_at(shards.epoch), True)
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
