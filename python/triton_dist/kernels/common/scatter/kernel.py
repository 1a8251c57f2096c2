"""GEMM whose tiles are sent to the ranks that own their rows, and the sum of the received tiles.

``A[M, K] @ B[K, N]`` is this rank's addend. M consists of ``NUM_RANKS`` row blocks of ``rows``
rows. Rank r owns row block r: it adds the row block over all ranks. The last row blocks may be
short or empty. A tile belongs to one row block. Except with ``"add"``, a tile is rounded to the
output's dtype and sent to the owner's slot, as part of this rank's *partial* (addend of the sum):

    partials of a slot, on each rank: [source rank, max_rows, N], ``slot.stride`` elements per rank

``slot.targets[s]`` is the address to which tiles of row block s are stored. ``slot.flags[s]`` is
the address of the flags that report the arrival of these tiles. ``SCATTER_MODE`` is one of:

``"tile"``       Tiles are stored in the owner's slot. Flag ``[tile * NUM_RANKS + rank]`` on the
                 owner is set to the epoch.
``"row_block"``  Tiles are stored in memory of this rank, from which a copy engine pushes. A row
                 block has chunks of ``chunk_tiles_m`` rows of tiles. Each chunk has a local counter
                 of finished tiles. When all its tiles are finished, the copy engine pushes the
                 chunk and sets flag ``[chunk * NUM_RANKS + rank]`` on the owner.
``"add"``        Tiles are added by atomics to a single fp32 sum on the owner. Flags are set as
                 with ``"tile"``. The owner's program for a tile waits for all flags of the tile,
                 rounds the sum, and resets it to zeros.
``"all"``        All-reduce: like ``"tile"``, and C is [M, N]. The owner's program for a tile stores
                 the sum to C and to address ``out.peer_sums[p]`` of each peer p. Then it sets flag
                 ``[tile * NUM_RANKS + rank]`` at ``out.peer_flags[p]``. ``scatter/to_all.py``
                 copies the received sums to C.

Except with ``"all"``, a rank multiplies its own row block last. When a program has multiplied a
tile of the own row block, it waits for the partials of this tile (or of its chunk) from every peer.
It adds all partials in fp32 in the order of ranks. Results are therefore deterministic, except with
``"add"``, which adds in the order of arrival. With ``"all"`` each row block is divided into chunks.
A rank multiplies the first chunk of every row block (its own row block last), then the second
chunks, and so on. Sums of a chunk are therefore sent while later chunks are multiplied.

*No deadlock.* ``tile_in_scatter_order`` defines the order of tiles. A program waits only for a tile
whose position in the peer's order is earlier than the position of its own tile. Before it waits, it
announces its own tiles of earlier positions (sets their flags). Of all waiting programs, consider
the one at the earliest position. The program that computes the awaited tile is not waiting. It is
either multiplying, and will announce the tile, or has not begun. If each program has one tile,
programs begin in the order of positions, so it will begin. A persistent program waits only if all
programs of its launch have begun; otherwise it leaves its tiles of the own row block to a later
kernel (``scatter/tiles.py``).

Kernel arguments; the rules of tuples are in ``docs/how-to/wait-for-a-peer.md``:

==============  =========  =======================================  ============================
argument        dtype      shape                                    written by
==============  =========  =======================================  ============================
slot.partials   of C       [NUM_RANKS, slot.stride]; for ``"add"``  GEMMs of the sources, or
                           fp32 [rows, N]                           their copy engines
slot.targets    int64      [NUM_RANKS], addresses by owner          host, once
slot.flags      int64      [NUM_RANKS], addresses of flags or       host, once
                           counters
slot.arrivals   int64      [work item, NUM_RANKS], by source rank   as ``slot.partials``
slot.epoch      int64      control words (``slots/epochs.py``)      kernels of this rank
slot.deferred   int32      [programs]                               kernels of this rank
out.c           of C       [rows, N]; of an all-reduce [M, N]       this kernel
out.bias        of C       [N], or ``None``                         caller
scales          fp32       ``gemm.scales.Scales`` of fp8 operands   caller
out.peer_sums   int64      [NUM_RANKS], addresses of [M, N];        host, once
                           ``None`` without an all-reduce
out.peer_flags  int64      [NUM_RANKS], addresses of their flags    host, once
M, rows         int        rows of A, of a row block; not           host
                           specialised
tile, summing   constants  ``Tile``, ``Summing``                    host
==============  =========  =======================================  ============================
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.scales import NO_SCALES, Scales, scales_of_shard
from triton_dist.kernels.common.gemm.tile import Strides, multiply_tile_by_pointers, store_tile
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.partials import TileMemory, tiles_of_row_block
from triton_dist.kernels.common.scatter.tiles import (
    add_own_tile,
    announce_tile,
    announce_to_all,
    await_partials,
    store_tile_by_pointers,
    sum_constants,
    tile_constants,
    tile_in_scatter_order,
)
from triton_dist.runtime.launch import Launch, fits_descriptor, normalise_strides

# From this number of waves per row block on, chunks are announced with a delay (ANNOUNCE_LATER).
_MANY_WAVES = 2


@jit
def make_target_descriptors(slot, rows, N, tile: tl.constexpr, NUM_RANKS: tl.constexpr):
    """Return a tuple of descriptors: this rank's partial in the slot of each owner.

    Descriptors created inside the loop over tiles would share one memory location, which a pending
    store may still read.
    """
    STORE_N: tl.constexpr = tile.N // 2 if tile.SUBTILE else tile.N
    descs = tl.tuple([])
    for owner in tl.static_range(NUM_RANKS):
        desc = tl.make_tensor_descriptor(
            target_at(slot.targets, owner, slot.partials), [1, rows, N],
            [rows.to(tl.int64) * N, N, 1], [1, tile.M, STORE_N],
        )  # fmt: skip
        descs = descs + (desc,)  # noqa: RUF005  # Triton has no starred expressions.
    return descs


@jit
def store_to_owner(
    descs, row_block, accumulator, row, column, tile: tl.constexpr, NUM_RANKS: tl.constexpr
):
    """Store a tile of ``row_block`` through the descriptor of its owner."""
    desc = descs[0]
    for owner in tl.static_range(1, NUM_RANKS):
        if row_block == owner:
            desc = descs[owner]
    store_tile(desc, accumulator, 0, row, column, tile.SUBTILE, tile.M, tile.N)


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_non_persistent(
    a_ptr,
    b_ptr,
    strides,
    slot,
    out,
    scales,
    N,
    K,
    M,
    rows,
    chunk_tiles_m,
    rank,
    tile: tl.constexpr,
    summing: tl.constexpr,
):
    """Compute one tile per program through pointers, for any strides of A and B. Grid (tiles,)."""
    NUM_RANKS: tl.constexpr = summing.NUM_RANKS
    PRECISION: tl.constexpr = tile.PRECISION
    SCALING: tl.constexpr = tile.SCALING
    tiles_m, tiles_n = tl.cdiv(rows, tile.M), tl.cdiv(N, tile.N)
    row_block, tile_number, m, n = tile_in_scatter_order(
        tl.program_id(0), rank, NUM_RANKS, tiles_m, tiles_n,
        chunk_tiles_m if summing.SCATTER_MODE == "all" else tiles_m, tile.GROUP_M,
    )  # fmt: skip
    work_item = m // chunk_tiles_m if summing.SCATTER_MODE == "row_block" else tile_number
    row, column = m * tile.M, n * tile.N
    a_row_block_ptr = a_ptr + row_block.to(tl.int64) * rows * strides.am
    rows_left = min(rows, M - row_block * rows) - row
    accumulator = multiply_tile_by_pointers(
        a_row_block_ptr, b_ptr, row, rows_left, column, N, K,
        strides.am, strides.ak, strides.bk, strides.bn, PRECISION, tile.M, tile.N, tile.K,
        tile.INT64_OFFSETS,
        scales, scales_of_shard(scales, None, SCALING), row_block * rows + row, SCALING,
    )  # fmt: skip
    store_tile_by_pointers(
        target_at(slot.targets, row_block, slot.partials), accumulator, row, column, rows, N,
        summing.SCATTER_MODE == "add", tile.M, tile.N, tile.INT64_OFFSETS,
    )  # fmt: skip
    if row_block != rank:
        announce_tile(slot, M, row_block, work_item, rank, summing)
    else:
        token = await_partials(slot, M, work_item, rank, NUM_RANKS)
        own_rows = min(rows, M - rank * rows)
        add_own_tile(slot, out, row, column, rows, own_rows, N, token, rank, tile, summing)
        if summing.SCATTER_MODE == "all":
            announce_to_all(out, slot, M, work_item, rank, NUM_RANKS)


def scattered_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    tile_memory: TileMemory,
    *,
    kernel: Any,
    num_sms: int,
    persistent: bool,
    num_chunks: int = 1,
    scales: tuple[Scales, int] = (NO_SCALES, 0),
) -> Launch:
    """Return the launch that computes ``A @ B``, sends its tiles to their owners, and stores the
    sum of this rank's row block in C.

    Args:
        C: contiguous. [M / num_ranks, N], this rank's rows of the sum; for ``"all"`` [M, N], of
            which this launch writes only this rank's rows.
        bias: [N], added to the sum; contiguous.
        config, num_sms, persistent: see ``sharded_gemm``. If A is not contiguous, the pointer
            kernel is used.
        tile_memory: memory to which tiles are sent and in which they arrive.
        kernel: the persistent kernel, which uses descriptors.
        num_chunks: number of chunks of a row block. With ``"row_block"`` chunks are pushed
            separately. With ``"all"`` the first chunk of all row blocks precedes all second chunks.
        scales: result of ``Scaling.kernel_argument`` without a bias.
    """
    A = normalise_strides(A)
    M, K = A.shape
    rows, N = tile_memory.rows_per_row_block(M), C.shape[1]
    tiles_per_row_block = tiles_of_row_block(config, rows, N)
    tiles = tile_memory.num_ranks * tiles_per_row_block
    tile, options = tile_constants(config, A, B, C.dtype, scales[1])
    summing, chunk_tiles_m, group_size_m = sum_constants(C, config, tile_memory, rows, num_chunks)
    tile = tile._replace(GROUP_M=group_size_m)
    memory, sizes = (
        tile_memory.kernel_arguments(C, bias),
        (N, K, M, rows, chunk_tiles_m, tile_memory.rank),
    )
    # Partials of a row block have the layout of C, so TMA can write them if it can write C.
    by_descriptor = persistent and tile.PRECISION != "ieee" and A.is_contiguous()
    if by_descriptor and fits_descriptor(A, B, C):
        # A chunk is pushed after its last tile. With few waves, announce this tile without delay.
        announce_later = (
            tile_memory.mode in ("tile", "all") or tiles_per_row_block >= _MANY_WAVES * num_sms
        )
        summing = summing._replace(ANNOUNCE_LATER=announce_later and tile_memory.mode != "add")
        return Launch(
            kernel,
            (min(num_sms, tiles),),
            (A, B, max(B.stride()), *memory, scales[0], *sizes),
            {**options, "NUM_SMS": num_sms, "tile": tile, "summing": summing},
        )
    # Reset constants that the pointer kernel does not read, to avoid needless compilations.
    tile = tile._replace(SUBTILE=False, B_COLUMN_MAJOR=False)
    return Launch(
        kernel_gemm_scatter_non_persistent,
        (tiles,),
        (A, B, Strides(*A.stride(), *B.stride()), *memory, scales[0], *sizes),
        {**options, "tile": tile, "summing": summing},
    )
