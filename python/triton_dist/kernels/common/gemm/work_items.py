"""Work items of the sharded GEMM (``gemm/sharded.py``): fused push and split-K.

*Fused push.* Copy engines take some us per copy, and a tile that waits for whole rows starts after
their last byte. For small shards this is most of the call. Instead, the first NUM_COMM_SMS programs
send this rank's shard in chunks along K, each to all peers. A tile multiplies the first chunk while
the next ones travel. Chunks grow in the ratio 1 : 2 : 3 …, so the first arrives early with few
flags in total. Each sending program sets its own flag, because its release only covers its own
stores. Flags of shard s are ``[s * FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program]``.

Sending cannot deadlock. Senders wait only until the peers have *consumed* the previous contents of
the slot, which earlier launches report. Senders do not compute before everything is sent, and their
low program numbers put them on SMs before any program that waits for peers. Other streams must
leave at least NUM_COMM_SMS SMs free.

*Split-K.* Tiles of the last wave, if it is not full, are split along K over several programs. Each
program stores its fp32 *partial* in a workspace and counts it. The program that counts last adds
the partials in the order of K, so the result is deterministic, and resets the counter for the next
launch. No program waits, so programs need not be resident at the same time.

A partial is stored in the register order of a Hopper accumulator: with wgmma a warp holds 16 rows,
and a thread holds 2 adjacent columns of every 8, in 2 rows. Each thread then stores and loads 16
bytes in full lines without shared memory, which the pipeline stages fill. Other devices can use any
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.tile import multiply_steps
from triton_dist.kernels.common.peers import epoch_at, flag_of, timeout_word_of


class Shards(NamedTuple):
    """Gathered rows [M, K] of all ranks, their flags, and the epoch of the slot.

    ``rows_table`` and ``arrivals_table`` have the addresses of each rank's rows and flags,
    ``consumed`` the last epoch that each peer has consumed. They are ``None`` unless the kernel
    sends this rank's shard. ``gemm.scales.Scales`` documents the
    members from ``a_scale`` on.
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


class Partials(NamedTuple):
    splits: Any
    counters: Any


class GEMMPlan(NamedTuple):
    """Constants of a sharded GEMM other than its tile sizes.

    Attributes:
        GATHERED: whether there are shards of other ranks.
        FLAGS_PER_RANK: distance between the flags of two shards.
        NUM_COMM_SMS: programs that send this rank's shard, in NUM_CHUNKS chunks along K.
        NUM_WARPS: warps that multiply.
        NUM_STAGES: pipeline stages of the warp-specialized kernel, else 0.
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


# A sending program reads a block of this size once and stores it to every peer. Its rows are 256
# contiguous bytes; with 8 warps a thread has 64 bytes in flight.
_CHUNK_ROWS = tl.constexpr(64)
_CHUNK_BYTES = tl.constexpr(256)
# Peers whose flags are waited for or set together.
_PEERS = tl.constexpr(16)


@jit
def first_step_of_chunk(chunk, steps, NUM_CHUNKS: tl.constexpr):
    """Return the first of ``steps`` steps along K in ``chunk``, or ``steps`` for NUM_CHUNKS."""
    # The sizes of chunks are proportional to 1, 2, 3, …: first steps are triangular numbers.
    return steps * (chunk * (chunk + 1) // 2) // (NUM_CHUNKS * (NUM_CHUNKS + 1) // 2)


@jit
def wait_for_chunk(shards, shard, rows, chunk, gemm_plan: tl.constexpr):
    """Wait until ``chunk`` of ``shard`` with ``rows`` rows has arrived. Return a token."""
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    program = tl.arange(0, triton.next_power_of_2(NUM_COMM_SMS))
    flags_ptr = shards.arrivals + shard * gemm_plan.FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program
    value = flag_of(shards.epoch, rows)
    return dl.wait(flags_ptr, NUM_COMM_SMS, value, timeout_word_of(shards.epoch), True)


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
    last = (epoch_at(shards.epoch) - 1).to(tl.int32)
    value = flag_of(shards.epoch, rows)
    # The last use of the slot must be consumed before its rows are overwritten.
    peers = num_ranks - 1
    for first_peer in range(0, peers, _PEERS):
        peer = (rank + 1 + first_peer + tl.arange(0, _PEERS)) % num_ranks
        dl.wait(shards.consumed + peer, peers - first_peer, last, timeout_word_of(shards.epoch))

    # Elements per 16 bytes, for ``tl.multiple_of``. Triton loses the hint on arguments and
    # results of calls.
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
            for first_peer in range(0, peers, _PEERS):
                number = first_peer + tl.arange(0, _PEERS)
                peer = (rank + 1 + number) % num_ranks
                flags_ptr = dl.symm_at(shards.arrivals, shards.arrivals_table, peer)
                flag = rank * gemm_plan.FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program
                dl.notify(flags_ptr + flag, value, mask=number < peers)


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
    """Send every ``NUM_COMM_SMS``-th block of columns ``column`` to ``end`` to all peers.

    Access ``VECTOR`` elements at a time. Serve the peers in the order in which they need this
    shard.
    """
    itemsize: tl.constexpr = local_ptr.dtype.element_ty.primitive_bitwidth // 8
    columns: tl.constexpr = _CHUNK_BYTES // itemsize
    shard_begin = tl.multiple_of(rank.to(tl.int64) * rows * K, VECTOR)
    chunks_down = tl.cdiv(rows, _CHUNK_ROWS)
    chunks = chunks_down * tl.cdiv(end - column, columns)
    for chunk in range(program, chunks, NUM_COMM_SMS):
        row_index = chunk % chunks_down * _CHUNK_ROWS + tl.arange(0, _CHUNK_ROWS)
        column_index = column + chunk // chunks_down * columns + tl.arange(0, columns)
        begin_of_row = tl.multiple_of(row_index.to(tl.int64) * K, VECTOR)
        offsets = begin_of_row[:, None] + column_index[None, :]
        mask = (row_index < rows)[:, None] & (column_index < end)[None, :]
        block = tl.load(local_ptr + offsets, mask=mask)
        for step in range(1, num_ranks):
            peer = (rank + num_ranks - step) % num_ranks
            # Inline, because a called function would lose the hint.
            peer_ptr = tl.load(shards.rows_table + peer).to(shards.rows.dtype)
            peer_ptr = tl.multiple_of(peer_ptr, VECTOR * itemsize)
            tl.store(peer_ptr + shard_begin + offsets, block, mask=mask)


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
    """Multiply like ``multiply_tile``, each chunk along K when it has arrived. Waits stay outside
    the pipelined loop."""
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


@dataclass(frozen=True)
class SplitWorkspace:
    """Memory in which partials of tiles are added. Launches that share it must not overlap.

    Attributes:
        partials: fp32, any content.
        counters: int32, one per split tile, all 0 between launches.
    """

    partials: torch.Tensor
    counters: torch.Tensor


def split_tiles(config: triton.Config, tiles: int, num_sms: int) -> tuple[int, int]:
    """Return the workspace size of a GEMM with ``tiles`` tiles as (fp32 elements, counters)."""
    tile = config.kwargs
    splits = tile.get("SPLIT_K", 1)
    if splits == 1:
        return 0, 0
    split = tiles % num_sms
    return split * splits * tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"], split


@jit
def work_items_of_tiles(tiles, unsplit_tiles, SPLIT_K: tl.constexpr):
    """Return the work items of the first ``tiles`` tiles. From tile ``unsplit_tiles`` on, tiles are
    split."""
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
        beyond = max(work_item - unsplit_tiles, 0)
        num_splits = tl.where(work_item < unsplit_tiles, 1, SPLIT_K)
        return min(work_item, unsplit_tiles) + beyond // SPLIT_K, beyond % SPLIT_K, num_splits


@jit
def _in_register_order(tile, NUM_WARPS: tl.constexpr):
    """Flatten [BLOCK_SIZE_M, BLOCK_SIZE_N] in the order of the workspace."""
    block_m: tl.constexpr = tile.shape[0]
    block_n: tl.constexpr = tile.shape[1]
    warps: tl.constexpr = min(NUM_WARPS, block_m // 16)
    splits = tl.reshape(tile, (block_m // 16 // warps, warps, 2, 8, block_n // 16, 2, 4, 2))
    return tl.reshape(tl.permute(splits, (4, 0, 2, 1, 3, 6, 5, 7)), (block_m * block_n,))


@jit
def _in_rows(
    partial, NUM_WARPS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """Invert ``_in_register_order``."""
    warps: tl.constexpr = min(NUM_WARPS, BLOCK_SIZE_M // 16)
    splits = tl.reshape(
        partial, (BLOCK_SIZE_N // 16, BLOCK_SIZE_M // 16 // warps, 2, warps, 8, 4, 2, 2)
    )
    return tl.reshape(tl.permute(splits, (1, 3, 2, 4, 0, 6, 5, 7)), (BLOCK_SIZE_M, BLOCK_SIZE_N))


@jit
def publish_partial(
    accumulator, partials, tile, split, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """Store a partial of the ``tile``-th split tile and count it; return whether it is the last."""
    size: tl.constexpr = accumulator.shape[0] * accumulator.shape[1]
    start = (tile * SPLIT_K + split).to(tl.int64) * size
    # Ordinary stores instead of TMA, because a release does not order TMA stores.
    block_ptr = partials.splits + start + tl.arange(0, size)
    tl.store(block_ptr, _in_register_order(accumulator, NUM_WARPS))
    tl.debug_barrier()  # The release is issued by one thread: wait for the stores of all threads.
    before = tl.atomic_add(partials.counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == SPLIT_K - 1
    if is_last:
        tl.store(partials.counters + tile, 0)
    return is_last


@jit
def sum_of_partials(
    accumulator, partials, tile, split, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """Return the fp32 sum of all partials of the ``tile``-th split tile.

    ``accumulator`` is its ``split``-th partial, which is still in registers.
    """
    block_m: tl.constexpr = accumulator.shape[0]
    block_n: tl.constexpr = accumulator.shape[1]
    size: tl.constexpr = block_m * block_n
    partial_ptr = partials.splits + tile.to(tl.int64) * (SPLIT_K * size) + tl.arange(0, size)
    # Bypass L1, which may hold stale partials.
    if SPLIT_K == 2:  # Two addends commute, so load only the other one.
        other = tl.load(partial_ptr + (1 - split) * size, cache_modifier=".cg")
        return accumulator + _in_rows(other, NUM_WARPS, block_m, block_n)
    else:
        total = tl.load(partial_ptr, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            partial_ptr += size
            total += tl.load(partial_ptr, cache_modifier=".cg")
        return _in_rows(total, NUM_WARPS, block_m, block_n)
