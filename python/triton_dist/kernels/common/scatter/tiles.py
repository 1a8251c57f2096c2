"""Device functions for a tile of the scattered GEMM: order, store, flags, wait and sum.

A tile is stored and announced to the rank that owns its rows. The owner waits for the tile and adds
it, in the GEMM or in a later launch. In an all-reduce the owner then sends the sum to all ranks.
"Own" rows or tiles are those that this rank owns. ``scatter/kernel.py`` describes the kernel
arguments. A *work item* here is the unit that has one flag: a tile, or a chunk of a row block.

*Deferred tiles.* A persistent program must not wait for peers before all programs of its launch
have begun. Otherwise it could deadlock: a kernel on another stream, such as a collective, may
occupy SMs and wait for a peer. On that peer, a program may wait for a tile of a program that has
not begun because it gets no SM. A program therefore waits only if all programs of its launch have
begun, because this rank then sends all its tiles. Otherwise the program defers its own tiles to a
later kernel on the stream, and ends. The later kernel can wait safely: on each peer, either all
programs have begun, or no program waits.

    epoch_ptr + NUM_BEGUN_WORD    number of programs that have begun in this use of the slot
    deferred [program]            whether a program has deferred its own tiles
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from triton_dist import language as dl
from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import scales_of_shard
from triton_dist.kernels.common.gemm.spaces import config_for_dtype
from triton_dist.kernels.common.gemm.tile import (
    multiply_tile,
    multiply_tile_by_pointers,
    tile_in_group,
)
from triton_dist.kernels.common.peers import current_flag, target_at, timeout_words_at
from triton_dist.kernels.common.scatter.partials import (
    TileMemory,
    chunks_of_row_block,
    tiles_of_row_block,
)
from triton_dist.runtime.launch import Launch, dot_precision

# Number of elements of all partials that are loaded per step. With 8 warps and 2 bytes per element,
# they take 64 registers per thread.
_PARTIAL_ELEMENTS_PER_STEP = 32768
# Index of a control word of a slot, after the words of ``slots/epochs.py``.
NUM_BEGUN_WORD = tl.constexpr(12)
# Decision of a program whether it may wait.
MAY_WAIT, MUST_DEFER = tl.constexpr(1), tl.constexpr(-1)


class Tile(NamedTuple):
    """Constants of a tile: BLOCK_SIZE_M, _N and _K, GROUP_SIZE_M, EPILOGUE_SUBTILE, and others.

    INT64_OFFSETS: offsets within the tile exceed 32 bits. SCALING: see ``gemm.scales.Scales``.
    SPLIT_K: see ``scatter/one_launch.py``; other kernels ignore it.
    """

    M: Any
    N: Any
    K: Any
    GROUP_M: Any
    SUBTILE: Any
    B_COLUMN_MAJOR: Any
    PRECISION: Any
    INT64_OFFSETS: Any = False
    SCALING: Any = 0
    SPLIT_K: Any = 1


class Summing(NamedTuple):
    """Constants of the sum.

    SCATTER_MODE: see ``scatter/kernel.py``. ANNOUNCE_LATER: a tile is announced after the next tile
    has been multiplied. ROWS_PER_STEP: number of rows of a tile that are summed at a time.
    """

    NUM_RANKS: Any
    SCATTER_MODE: Any
    ANNOUNCE_LATER: Any
    ROWS_PER_STEP: Any


@jit
def make_operands(
    a_ptr, b_ptr, M, N, K, stride_bk, stride_bn, DESCRIPTORS: tl.constexpr, tile: tl.constexpr
):
    """Return A [M, K] and B [K, N] for ``multiply_operands``, as descriptors or pointers."""
    a, b = a_ptr, b_ptr
    if DESCRIPTORS:
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [tile.M, tile.K])
        if tile.B_COLUMN_MAJOR:
            b = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_bn, 1], [tile.N, tile.K])
        else:
            b = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_bk, 1], [tile.K, tile.N])
    return a, b


@jit
def multiply_operands(
    a, b, row, column, M, N, K, strides, scales, DESCRIPTORS: tl.constexpr, tile: tl.constexpr,
    split=0, SPLIT_K: tl.constexpr = 1,
):  # fmt: skip
    """Return the scaled fp32 tile at ``row`` and ``column``. a and b are from ``make_operands``.

    The product is over part ``split`` of SPLIT_K parts of K. With pointers, the first part is all
    of K and the others are empty. ``strides`` are only used for pointers.
    """
    PRECISION: tl.constexpr = tile.PRECISION
    SCALING: tl.constexpr = tile.SCALING
    a_scale_ptr = scales_of_shard(scales, None, SCALING)
    if DESCRIPTORS:
        product = multiply_tile(
            a, b, row, column, K, split, SPLIT_K, tile.B_COLUMN_MAJOR, PRECISION, tile.M, tile.N,
            tile.K, scales, a_scale_ptr, row, M, N, SCALING,
        )  # fmt: skip
    else:
        if SPLIT_K > 1:
            K = tl.where(split == 0, K, 0)
        product = multiply_tile_by_pointers(
            a, b, row, M - row, column, N, K, strides.am, strides.ak, strides.bk, strides.bn,
            PRECISION, tile.M, tile.N, tile.K, tile.INT64_OFFSETS, scales, a_scale_ptr, row,
            SCALING,
        )  # fmt: skip
    return product


@jit
def tile_in_scatter_order(
    index, rank, num_ranks, tiles_m, tiles_n, chunk_tiles_m, GROUP_SIZE_M: tl.constexpr
):
    """Return (row block, number of the tile in its row block, m, n) of tile ``index`` of the order.

    Row blocks have ``tiles_m`` by ``tiles_n`` tiles. They are divided into chunks of
    ``chunk_tiles_m`` rows of tiles; the last chunk may have fewer. The order has the first chunk of
    all row blocks, from rank + 1 to this rank, then the second chunk of all row blocks, and so on.
    At each position of the order, all ranks work on the same chunk number, and the owner of a row
    block is the last rank that reaches it.
    """
    chunk_tiles = chunk_tiles_m * tiles_n
    chunk = index // (num_ranks * chunk_tiles)
    rows_of_tiles = min(tiles_m - chunk * chunk_tiles_m, chunk_tiles_m)
    inside = index - chunk * num_ranks * chunk_tiles
    # From rank + 1 to this rank: every rank receives from one peer at a time, and has received all
    # partials when it reaches its own row block.
    row_block = (rank + 1 + inside // (rows_of_tiles * tiles_n)) % num_ranks
    tile = inside % (rows_of_tiles * tiles_n)
    m, n = tile_in_group(tile, rows_of_tiles, tiles_n, GROUP_SIZE_M)
    return row_block, chunk * chunk_tiles + tile, chunk * chunk_tiles_m + m, n


@jit
def announce_tile(slot, M, row_block, work_item, rank, summing: tl.constexpr):
    """Report that a tile of another rank's ``row_block`` is stored, to its owner or copy engine."""
    with dl.mark("push"):
        flag = tl.load(slot.flags + row_block)
        if summing.SCATTER_MODE == "row_block":
            dl.notify(flag.to(tl.pointer_type(tl.int32)) + work_item, 1, "add")
        else:
            flag_ptr = flag.to(slot.epoch.dtype) + work_item * summing.NUM_RANKS + rank
            dl.notify(flag_ptr, current_flag(slot.epoch, M))


@jit
def announce_to_all(out, slot, M, work_item, rank, NUM_RANKS: tl.constexpr):
    """Set this rank's flag of a work item on every rank, after all stores of the program.

    This rank's own flag is also set.

    One thread sets the flag of each rank. If one thread set all flags, each release would wait
    until the previous release has crossed the link.
    """
    peer = tl.arange(0, triton.next_power_of_2(NUM_RANKS))
    valid = peer < NUM_RANKS
    flags = tl.load(out.peer_flags + peer, mask=valid, other=0).to(slot.epoch.dtype)
    with dl.mark("push"):
        dl.notify(flags + work_item * NUM_RANKS + rank, current_flag(slot.epoch, M), mask=valid)


@jit
def await_partials(slot, M, work_item, rank, NUM_RANKS: tl.constexpr):
    """Wait until a work item has arrived from every peer. Return a wait token.

    ``M``, the number of rows of A, must be equal on all ranks.
    """
    value = current_flag(slot.epoch, M)
    token = 0
    for step in range(1, NUM_RANKS):
        source = (rank + step) % NUM_RANKS
        flag_ptr = slot.arrivals + work_item * NUM_RANKS + source
        token += dl.wait(flag_ptr, 1, value, timeout_words_at(slot.epoch), True)
    return token


@jit
def add_partials(
    partials_ptr,
    stride,
    out,
    own_begin,
    sums_begin,
    row,
    column,
    rows,
    N,
    token,
    rank,
    NUM_RANKS: tl.constexpr,
    IN_ONE_SUM: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    ROWS_PER_STEP: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    SPLIT_K: tl.constexpr = 1,
):
    """Sum a tile over all ranks and store it in the own rows [rows, N] at ``out.c + own_begin``.

    ROWS_PER_STEP rows are summed at a time, so that the partials fit in registers. If
    ``out.peer_sums`` is not ``None``, also store the sum on each peer, ``sums_begin`` elements from
    its address. ``IN_ONE_SUM``: all ranks have already added to a single sum, which is reset to 0.
    Otherwise there are SPLIT_K partials of each rank.
    """
    if INT64_OFFSETS:
        N = tl.cast(N, tl.int64)
    c_ptr = out.c + own_begin
    column_index = column + tl.arange(0, BLOCK_SIZE_N)
    column_mask = column_index < N
    inside = tl.arange(0, ROWS_PER_STEP)[:, None] * N + tl.arange(0, BLOCK_SIZE_N)[None, :]
    for first in range(0, BLOCK_SIZE_M, ROWS_PER_STEP):
        first_row = dl.consume_token(row + first, token)
        mask = (first_row + tl.arange(0, ROWS_PER_STEP) < rows)[:, None] & column_mask[None, :]
        begin = first_row.to(tl.int64) * N + column
        # The loads bypass L1, which may hold stale data. All loads precede the first addition, so
        # that they are in flight together.
        if IN_ONE_SUM:
            sum_ptr = partials_ptr + begin + inside
            total = tl.load(sum_ptr, mask=mask, other=0.0, cache_modifier=".cg")
            # Triton gives the loads and the stores of zeros different layouts. Without the barrier,
            # a thread may clear an element that another thread has not loaded yet.
            tl.debug_barrier()
            tl.store(sum_ptr, tl.zeros_like(total), mask=mask)
        else:
            partials = tl.tuple([])
            for source in tl.static_range(NUM_RANKS * SPLIT_K):
                partial_ptr = partials_ptr + source * stride.to(tl.int64) + begin + inside
                partial = tl.load(partial_ptr, mask=mask, other=0.0, cache_modifier=".cg")
                partials = partials + (partial,)  # noqa: RUF005  # no stars in Triton
            total = partials[0].to(tl.float32)
            for source in tl.static_range(1, NUM_RANKS * SPLIT_K):
                total += partials[source].to(tl.float32)
        if out.bias is not None:
            bias = tl.load(out.bias + column_index, mask=column_mask, other=0.0)
            total += bias.to(tl.float32)[None, :]
        value = total.to(c_ptr.dtype.element_ty)
        tl.store(c_ptr + begin + inside, value, mask=mask)
        if out.peer_sums is not None:
            for step in tl.static_range(1, NUM_RANKS):
                peer_ptr = target_at(out.peer_sums, (rank + step) % NUM_RANKS, c_ptr)
                tl.store(peer_ptr + sums_begin + begin + inside, value, mask=mask)


@jit
def add_own_tile(
    slot, out, row, column, rows, own_rows, N, token, rank, tile: tl.constexpr,
    summing: tl.constexpr,
):  # fmt: skip
    """Sum a tile of the own row block of ``own_rows`` rows. Full row blocks have ``rows`` rows."""
    own_begin = 0  # begin of the own rows in C
    if out.peer_sums is not None:
        own_begin = rank.to(tl.int64) * rows * N
    add_partials(
        slot.partials, slot.stride, out, own_begin, own_begin, row, column, own_rows, N, token,
        rank, summing.NUM_RANKS, summing.SCATTER_MODE == "add", tile.M, tile.N,
        summing.ROWS_PER_STEP, tile.INT64_OFFSETS,
    )  # fmt: skip


@jit
def store_tile_by_pointers(
    target_ptr,
    accumulator,
    row,
    column,
    rows,
    N,
    ADD: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
):
    """Store or add the part of a tile that lies inside [rows, N] at ``target_ptr``.

    ``row`` may be negative: the tile then begins before the target's first row.
    """
    if INT64_OFFSETS:
        N = tl.cast(N, tl.int64)
    local_row, local_column = tl.arange(0, BLOCK_SIZE_M), tl.arange(0, BLOCK_SIZE_N)
    inside = (local_row >= -row) & (local_row < rows - row)
    mask = inside[:, None] & (local_column < N - column)[None, :]
    # Only the base needs 64 bits. 64-bit offsets of each element would take more registers.
    tile_ptr = target_ptr + (row.to(tl.int64) * N + column)
    block = tile_ptr + (local_row[:, None] * N + local_column[None, :])
    with dl.mark("store"):
        if ADD:
            tl.atomic_add(block, accumulator, mask=mask, sem="relaxed", scope="sys")
        else:
            tl.store(block, accumulator.to(target_ptr.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # Other threads of this program may read the tile later.


@jit
def count_begun_program(epoch_ptr):
    tl.atomic_add(epoch_ptr + NUM_BEGUN_WORD, 1, sem="relaxed", scope="gpu")


@jit
def decide_whether_to_wait(epoch_ptr, deferred_ptr):
    """Return ``MAY_WAIT`` if all programs of this launch have begun, else ``MUST_DEFER``.

    With ``MUST_DEFER``, all own tiles of this program are deferred to the next kernel.
    """
    decision = MAY_WAIT
    if _count_of_begun_programs(epoch_ptr) < tl.num_programs(0):
        # In the interpreter, let other programs begin, then check again.
        dl.give_turn()
        if _count_of_begun_programs(epoch_ptr) < tl.num_programs(0):
            tl.store(deferred_ptr + tl.program_id(0), 1)
            decision = MUST_DEFER
    return decision


@jit
def _count_of_begun_programs(epoch_ptr):
    return tl.atomic_add(epoch_ptr + NUM_BEGUN_WORD, 0, sem="relaxed", scope="gpu")


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_add_deferred(
    slot,
    out,
    N,
    M,
    rows,
    chunk_tiles_m,
    rank,
    NUM_SMS: tl.constexpr,
    tile: tl.constexpr,
    summing: tl.constexpr,
):
    """Add the own tiles that programs of the GEMM have deferred. Grid: the grid of the GEMM.

    Each program adds the tiles that the GEMM program with its number has deferred.
    """
    if tl.program_id(0) == 0:
        tl.store(slot.epoch + NUM_BEGUN_WORD, 0)
    has_deferred = tl.load(slot.deferred + tl.program_id(0)) != 0
    tl.debug_barrier()  # All warps must have loaded the flag before a warp clears it.
    if has_deferred:
        tl.store(slot.deferred + tl.program_id(0), 0)
        tiles_m, tiles_n = tl.cdiv(rows, tile.M), tl.cdiv(N, tile.N)
        chunk_tiles_in_order = chunk_tiles_m if summing.SCATTER_MODE == "all" else tiles_m
        for index in range(tl.program_id(0), summing.NUM_RANKS * tiles_m * tiles_n, NUM_SMS):
            row_block, tile_number, m, n = tile_in_scatter_order(
                index, rank, summing.NUM_RANKS, tiles_m, tiles_n, chunk_tiles_in_order, tile.GROUP_M
            )
            if row_block == rank:
                work_item = (
                    m // chunk_tiles_m if summing.SCATTER_MODE == "row_block" else tile_number
                )
                token = await_partials(slot, M, work_item, rank, summing.NUM_RANKS)
                add_own_tile(
                    slot, out, m * tile.M, n * tile.N, rows, min(rows, M - rank * rows), N, token,
                    rank, tile, summing,
                )  # fmt: skip
                if summing.SCATTER_MODE == "all":
                    announce_to_all(out, slot, M, tile_number, rank, summing.NUM_RANKS)


def tile_constants(
    config: triton.Config,
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    scaling: int = 0,
) -> tuple[Tile, dict[str, Any]]:
    """Return the tile constants for ``A @ B``, and the options of the launch."""
    device_config = config_for_dtype(config, A.dtype, out_dtype)
    sizes, all_options = device_config.kwargs, device_config.all_kwargs()
    block_m, block_n, block_k = (sizes[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    tile = Tile(
        block_m, block_n, block_k, sizes["GROUP_SIZE_M"],
        sizes.get("EPILOGUE_SUBTILE", False), B.stride(0) == 1, dot_precision(A.dtype),
        max(block_k * A.stride(1), block_k * B.stride(0), block_m * B.shape[1]) >= 2**31,
        scaling, sizes.get("SPLIT_K", 1),
    )  # fmt: skip
    return tile, {name: option for name, option in all_options.items() if name not in sizes}


def sum_constants(
    C: torch.Tensor, config: triton.Config, tile_memory: TileMemory, rows: int, num_chunks: int
) -> tuple[Summing, int, int]:
    """Return (constants of the sum, rows of tiles per chunk, GROUP_SIZE_M).

    With this GROUP_SIZE_M, each chunk is completed before the next begins.
    """
    tile = config.kwargs
    chunk_tiles_m, group_size_m = 1, tile["GROUP_SIZE_M"]
    if tile_memory.mode in ("row_block", "all"):
        chunks = chunks_of_row_block(config, rows, C.shape[1], num_chunks)
        chunk_tiles_m, group_size_m = chunks.tiles_m, chunks.group_size_m
    bytes_of_partials = tile_memory.num_ranks * C.element_size()
    step = rows_per_step(tile["BLOCK_SIZE_M"], tile["BLOCK_SIZE_N"], bytes_of_partials)
    summing = Summing(tile_memory.num_ranks, tile_memory.mode, False, step)
    return summing, chunk_tiles_m, group_size_m


def add_deferred_tiles(
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    tile_memory: TileMemory,
    *,
    M: int,
    num_sms: int,
    num_chunks: int = 1,
) -> Launch:
    """Return the launch that adds the tiles that a persistent ``scattered_gemm`` has deferred.

    M is the number of rows of A.
    """
    rows, N = tile_memory.rows_per_row_block(M), C.shape[1]
    summing, chunk_tiles_m, group_size_m = sum_constants(C, config, tile_memory, rows, num_chunks)
    block_m, block_n = config.kwargs["BLOCK_SIZE_M"], config.kwargs["BLOCK_SIZE_N"]
    tiles = tile_memory.num_ranks * tiles_of_row_block(config, rows, N)
    arguments = (
        *tile_memory.kernel_arguments(C, bias),
        N,
        M,
        rows,
        chunk_tiles_m,
        tile_memory.rank,
    )
    # The kernel does not multiply. Constants that it does not read are fixed, so that configs with
    # equal tile sizes share one compiled kernel.
    tile = Tile(block_m, block_n, 0, group_size_m, False, False, "tf32", block_m * N >= 2**31)
    options = {"NUM_SMS": num_sms, "tile": tile, "summing": summing, "num_warps": 8}
    return Launch(kernel_add_deferred, (min(num_sms, tiles),), arguments, options)


def rows_per_step(block_m: int, block_n: int, bytes_of_partials: int) -> int:
    """Return the number of rows of a tile to sum at a time, a power of two.

    ``bytes_of_partials`` are the bytes of one element of the partials of all ranks together.
    """
    max_rows = 2 * _PARTIAL_ELEMENTS_PER_STEP // bytes_of_partials // block_n
    return max(1, min(block_m, 1 << max_rows.bit_length() - 1 if max_rows else 1))
