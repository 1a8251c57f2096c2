"""Work of the sharded GEMM (``gemm/sharded.py``) beside whole tiles: its first programs may send
the own shard (*fused push*), and tiles may be cut in parts along K (*split-K*).

*Fused push.* Copy engines take some us for each copy, and a tile that waits for whole rows begins
when the last byte of them is there. Where shards are small that is most of the call. Here the
programs with the lowest numbers first send the own shard, chunk by chunk of K, each chunk to all
peers, and a tile multiplies the first chunk while the next ones travel.

Nobody waits in a circle: the sending programs wait only until the peers have *consumed* what the
slot held before, which earlier launches tell them; they compute nothing before all is sent; and
being the lowest, they are on SMs before any program that waits for what peers' send. That takes an
SM for each of them: what other streams' kernels leave must be so many.

Chunks grow (1, 2, 3, … parts of K), so that the first is there soon and the others need few flags.
Flags of shard s: ``[s * FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program]``, one for each sending
program, because what a program stored is released by itself.

*Split-K.* A tile of C is the sum of parts along K, computed by different programs. Cut are the
tiles of the last wave, if it is not full; so all of them, if there are fewer than programs. Each
part is written as an fp32 *partial* to a workspace, then counted. Who counts the last part of a
tile adds all of them, in the order of K or two in either order, so the result does not depend on
who was last; it also sets the counter back to 0 for the next launch. Nobody waits, so no program
depends on another one being resident.

A partial lies in the workspace in the order in which the registers of a Hopper accumulator hold it
(wgmma: 16 rows a warp; a thread has 2 neighbouring columns of every 8, in 2 rows). So 16 bytes a
thread are stored and read back in full lines, and nothing goes through shared memory, which the
stages of A and B fill. Elsewhere the order is as good as any.
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
    """Gathered rows [M, K] of all ranks, their flags and the epoch of the slot; of a kernel that
    sends the own shard also addresses of each rank's rows and flags, and the last epoch whose
    shards each peer has consumed, else ``None``."""

    rows: Any
    arrivals: Any
    epoch: Any
    rows_table: Any
    arrivals_table: Any
    consumed: Any


class Partials(NamedTuple):
    """A ``SplitWorkspace``, as kernels take it."""

    splits: Any
    counters: Any


class GEMMPlan(NamedTuple):
    """Constants of a sharded GEMM beside its tiles.

    GATHERED: there are other shards than the own one. NUM_COMM_SMS: programs that send the own
    shard, in NUM_CHUNKS chunks along K. NUM_WARPS: that multiply. NUM_STAGES: of the kernel with
    specialised warps, else 0. INT64_OFFSETS: of ``multiply_tile_by_pointers``.
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


# A piece is what a program reads, then writes to every peer: rows of 256 contiguous bytes. A thread
# has 64 bytes of it in flight (8 warps); a read is worth as many writes as there are peers.
_CHUNK_ROWS = tl.constexpr(64)
_CHUNK_BYTES = tl.constexpr(256)
# Peers that are looked at, and told, at once.
_PEERS = tl.constexpr(16)


@jit
def first_step_of_chunk(chunk, steps, NUM_CHUNKS: tl.constexpr):
    """First of ``steps`` steps along K that belongs to ``chunk``; all, for chunk NUM_CHUNKS."""
    return steps * (chunk * (chunk + 1) // 2) // (NUM_CHUNKS * (NUM_CHUNKS + 1) // 2)


@jit
def wait_for_chunk(shards, shard, rows, chunk, gemm_plan: tl.constexpr):
    """Wait until ``chunk`` of ``shard``, which has ``rows``, is gathered; gives a token."""
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    program = tl.arange(0, triton.next_power_of_2(NUM_COMM_SMS))
    flags_ptr = shards.arrivals + shard * gemm_plan.FLAGS_PER_RANK + chunk * NUM_COMM_SMS + program
    value = flag_of(shards.epoch, rows)
    return dl.wait(flags_ptr, NUM_COMM_SMS, value, timeout_word_of(shards.epoch), True)


@jit
def push_own_shard(
    own_ptr,
    shards,
    rows,
    K,
    rank,
    num_ranks,
    gemm_plan: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Send this program's pieces of the own shard [rows, K] to all peers, and set its flags there.

    ``ALIGNED``: rows begin at multiples of 16 bytes here and on the peers.
    """
    NUM_CHUNKS: tl.constexpr = gemm_plan.NUM_CHUNKS
    NUM_COMM_SMS: tl.constexpr = gemm_plan.NUM_COMM_SMS
    program = tl.program_id(0)
    last = (epoch_at(shards.epoch) - 1).to(tl.int32)
    value = flag_of(shards.epoch, rows)
    peers = num_ranks - 1
    for first_peer in range(0, peers, _PEERS):
        peer = (rank + 1 + first_peer + tl.arange(0, _PEERS)) % num_ranks
        dl.wait(shards.consumed + peer, peers - first_peer, last, timeout_word_of(shards.epoch))

    # Elements that are known to lie together. Such hints hold where they stand, and are lost when
    # they stand on what a call returns or is given.
    itemsize: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth // 8
    vector: tl.constexpr = 16 // itemsize if ALIGNED else 1
    steps = tl.cdiv(K, BLOCK_SIZE_K)
    for chunk in range(NUM_CHUNKS):
        column = first_step_of_chunk(chunk, steps, NUM_CHUNKS) * BLOCK_SIZE_K
        end = first_step_of_chunk(chunk + 1, steps, NUM_CHUNKS) * BLOCK_SIZE_K
        end = tl.multiple_of(min(end, K), vector)
        with dl.mark("push"):
            _push_columns(
                own_ptr, shards, rows, K, column, end, program, rank, num_ranks, NUM_COMM_SMS,
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
    own_ptr,
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
    """Send columns ``column`` to ``end``: every ``NUM_COMM_SMS``-th piece, ``VECTOR`` elements at a
    time. In the order in which peers come to this shard."""
    itemsize: tl.constexpr = own_ptr.dtype.element_ty.primitive_bitwidth // 8
    columns: tl.constexpr = _CHUNK_BYTES // itemsize
    begin_of_shard = tl.multiple_of(rank.to(tl.int64) * rows * K, VECTOR)
    chunks_down = tl.cdiv(rows, _CHUNK_ROWS)
    chunks = chunks_down * tl.cdiv(end - column, columns)
    for chunk in range(program, chunks, NUM_COMM_SMS):
        row_index = chunk % chunks_down * _CHUNK_ROWS + tl.arange(0, _CHUNK_ROWS)
        column_index = column + chunk // chunks_down * columns + tl.arange(0, columns)
        begin_of_row = tl.multiple_of(row_index.to(tl.int64) * K, VECTOR)
        offsets = begin_of_row[:, None] + column_index[None, :]
        mask = (row_index < rows)[:, None] & (column_index < end)[None, :]
        block = tl.load(own_ptr + offsets, mask=mask)
        for step in range(1, num_ranks):
            peer = (rank + num_ranks - step) % num_ranks
            peer_ptr = tl.load(shards.rows_table + peer).to(shards.rows.dtype)  # not by a call
            peer_ptr = tl.multiple_of(peer_ptr, VECTOR * itemsize)
            tl.store(peer_ptr + begin_of_shard + offsets, block, mask=mask)


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
    """``multiply_tile`` from ``row`` of ``shard`` on, whose ``rows`` arrive in chunks along K: each
    is multiplied as soon as it is there. The waits stand outside of the loop that is pipelined."""
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
    """Memory in which parts of tiles are added up; launches that use one follow one another on the
    device.

    ``partials`` fp32, any content; ``counters`` int32, one a split tile, all 0 between launches.
    """

    partials: torch.Tensor
    counters: torch.Tensor


def split_tiles(config: triton.Config, tiles: int, num_sms: int) -> tuple[int, int]:
    """(fp32 elements, counters) of workspace that ``config`` takes for a GEMM of ``tiles`` tiles on
    ``num_sms`` programs."""
    tile = config.kwargs
    splits = tile.get("SPLIT_K", 1)
    if splits == 1:
        return 0, 0
    split = tiles % num_sms
    return split * splits * tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"], split


@jit
def work_items_of_tiles(tiles, whole, SPLIT_K: tl.constexpr):
    """Units of work of the first ``tiles`` tiles, of which those from ``whole`` on are split."""
    if SPLIT_K == 1:
        return tiles
    else:
        return min(tiles, whole) + max(tiles - whole, 0) * SPLIT_K


@jit
def split_of_work_item(work_item, whole, SPLIT_K: tl.constexpr):
    """(tile, part, number of parts of that tile) of the ``work_item``-th unit of work."""
    if SPLIT_K == 1:
        return work_item, 0, 1
    else:
        beyond = max(work_item - whole, 0)
        num_splits = tl.where(work_item < whole, 1, SPLIT_K)
        return min(work_item, whole) + beyond // SPLIT_K, beyond % SPLIT_K, num_splits


@jit
def _in_register_order(tile, NUM_WARPS: tl.constexpr):
    """[BLOCK_SIZE_M, BLOCK_SIZE_N] as one dimension, in the order of the workspace."""
    block_m: tl.constexpr = tile.shape[0]
    block_n: tl.constexpr = tile.shape[1]
    warps: tl.constexpr = min(NUM_WARPS, block_m // 16)
    splits = tl.reshape(tile, (block_m // 16 // warps, warps, 2, 8, block_n // 16, 2, 4, 2))
    return tl.reshape(tl.permute(splits, (4, 0, 2, 1, 3, 6, 5, 7)), (block_m * block_n,))


@jit
def _in_rows(
    partial, NUM_WARPS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """The inverse of ``_in_register_order``."""
    warps: tl.constexpr = min(NUM_WARPS, BLOCK_SIZE_M // 16)
    splits = tl.reshape(
        partial, (BLOCK_SIZE_N // 16, BLOCK_SIZE_M // 16 // warps, 2, warps, 8, 4, 2, 2)
    )
    return tl.reshape(tl.permute(splits, (1, 3, 2, 4, 0, 6, 5, 7)), (BLOCK_SIZE_M, BLOCK_SIZE_N))


@jit
def publish_partial(
    accumulator,
    partials,
    tile,
    split,
    SPLIT_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Store a part of the ``tile``-th split tile and count it; whether it was the last one."""
    size: tl.constexpr = accumulator.shape[0] * accumulator.shape[1]
    start = (tile * SPLIT_K + split).to(tl.int64) * size
    # Ordinary stores, no TMA: a release orders only these.
    block_ptr = partials.splits + start + tl.arange(0, size)
    tl.store(block_ptr, _in_register_order(accumulator, NUM_WARPS))
    tl.debug_barrier()  # the release is one thread's; all threads' stores come before it
    before = tl.atomic_add(partials.counters + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == SPLIT_K - 1
    if is_last:
        tl.store(partials.counters + tile, 0)
    return is_last


@jit
def sum_of_partials(
    accumulator, partials, tile, split, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """fp32 [BLOCK_SIZE_M, BLOCK_SIZE_N], the sum of all parts of the ``tile``-th split tile;
    ``accumulator`` is its ``split``-th."""
    block_m: tl.constexpr = accumulator.shape[0]
    block_n: tl.constexpr = accumulator.shape[1]
    size: tl.constexpr = block_m * block_n
    part_ptr = partials.splits + tile.to(tl.int64) * (SPLIT_K * size) + tl.arange(0, size)
    # Not from L1, where old ones may be.
    if SPLIT_K == 2:  # the other's is enough: a + b = b + a
        other = tl.load(part_ptr + (1 - split) * size, cache_modifier=".cg")
        return accumulator + _in_rows(other, NUM_WARPS, block_m, block_n)
    else:
        total = tl.load(part_ptr, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            part_ptr += size
            total += tl.load(part_ptr, cache_modifier=".cg")
        return _in_rows(total, NUM_WARPS, block_m, block_n)
