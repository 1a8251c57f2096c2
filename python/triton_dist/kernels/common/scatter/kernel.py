"""GEMM whose tiles go to the ranks that own their rows, and the sum of what arrives.

``A[M, K] @ B[K, N]`` is this rank's addend of a product; M consists of ``NUM_RANKS`` row blocks of
``rows`` rows, one owned by each rank; the last ones may be short, or empty. A tile belongs to one
row block and is stored, rounded to the output's dtype, into this rank's part of the owner's slot:

    partials of a slot, on each rank: [source rank, max_rows, N], ``slot.stride`` elements a rank

Where the tiles of row block s go is ``slot.targets[s]``, an address; what says that they are there
are flags from ``slot.flags[s]`` on, also an address. Four ways (``SCATTER``):

``"tile"``      target: the owner's slot; flag ``[tile * NUM_RANKS + rank]`` on the owner is set to
                the epoch.
``"row_block"`` target: memory of this rank, from which a copy engine pushes. Each chunk of a row
                block, ``chunk_tiles_m`` rows of tiles, has a counter of its tiles here. After a
                chunk the copy engine sets flag ``[chunk * NUM_RANKS + rank]`` on the owner to the
                epoch.
``"add"``       target: one fp32 sum on the owner, to which tiles are added by atomics; flags as of
                ``"tile"``. Who finishes a tile of the own block waits, rounds, and leaves zeros.
``"all"``       an all-reduce: as ``"tile"``, and C is [M, N]: who has added a tile of the own block
                stores the sum to C and to ``out.sums[p]`` of each peer p, addresses, and then sets
                flag ``[tile * NUM_RANKS + rank]`` from ``out.sum_flags[p]`` on.
                ``scatter/to_all.py`` brings what arrives there to C.

The own row block comes last: the program that has computed one of its tiles waits for the same
tile, or its chunk, of every peer, and adds them all in fp32 in the order of ranks. So ``"tile"``,
``"row_block"`` and ``"all"`` give the same bits on every call; ``"add"`` adds in the order of
arrival.

With ``"all"``, row blocks come in chunks (``tile_in_scatter_order``), of each chunk the own row
block last: so sums travel while later chunks are multiplied.

Ranks cannot wait in a circle. A wait at one place of the order is for tiles that peers have at
earlier places of theirs. One that waits has announced its tiles of earlier places, and nothing but
these waits keeps it from its next tile. So of all that wait in the end, the one at the earliest
place would have nobody left to wait for, but programs that have not begun. Of one tile a program,
these come later in the order. A persistent program waits only where all have begun, and else leaves
its own tiles to a kernel behind this one (``scatter/tiles.py``).

What kernels take; the rules of their tuples are in ``docs/how-to/wait-for-a-peer.md``:

==============  ==========  =======================================  ============================
argument        dtype       shape                                    who writes
==============  ==========  =======================================  ============================
slot.partials   of C; fp32  [NUM_RANKS, slot.stride]; of ``"add"``   the sources' GEMMs, or their
                            [rows, N]                                copy engines
slot.targets    int64       [NUM_RANKS], addresses by owner          the host, once
slot.flags      int64       the same, of flags or counters           the host, once
slot.arrivals   int64       [unit, NUM_RANKS], by source rank        as ``partials``
slot.epoch      int64       the line of the slot                     this rank's kernels
slot.deferred       int32       [programs]                               this rank's kernels
out.c           of A        [rows, N]; of an all-reduce [M, N]       this kernel
out.bias        of A        [N], or ``None``                         the caller
out.sums        int64       [NUM_RANKS], addresses of [M, N]; or     the host, once
                            ``None``: no all-reduce
out.sum_flags   int64       the same, of their flags                 the host, once
M, rows         int         of A, of a row block; not specialised         the host
tile, summing   constants   ``Tile``, ``Summing``                    the host
==============  ==========  =======================================  ============================
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit
from triton_dist.kernels.common.gemm.tile import (
    Strides,
    multiply_tile,
    multiply_tile_by_pointers,
    store_tile,
)
from triton_dist.kernels.common.launch import Launch, fits_descriptor, normalise_strides
from triton_dist.kernels.common.peers import target_at
from triton_dist.kernels.common.scatter.partials import Scattering, tiles_of_row_block
from triton_dist.kernels.common.scatter.tiles import (
    add_own_tile,
    announce_tile,
    announce_to_all,
    await_partials,
    store_tile_by_pointers,
    summing_of,
    tile_in_scatter_order,
    tile_of,
)

# Waves of tiles of a row block from which on a chunk is worth more waiting than each of its tiles.
_MANY_WAVES = 2


@jit
def describe_targets(slot, rows, N, tile: tl.constexpr, NUM_RANKS: tl.constexpr):
    """A descriptor of this rank's part of each owner's slot, to choose from: made in the loop, each
    would lie in the place of the last one, which a store may still be reading."""
    STORE_N: tl.constexpr = tile.N // 2 if tile.SUBTILE else tile.N
    descs = tl.tuple([])
    for owner in tl.static_range(NUM_RANKS):
        desc = tl.make_tensor_descriptor(
            target_at(slot.targets, owner, slot.partials), [1, rows, N],
            [rows.to(tl.int64) * N, N, 1], [1, tile.M, STORE_N],
        )  # fmt: skip
        descs = descs + (desc,)  # noqa: RUF005  # a star is no Triton
    return descs


@jit
def store_to_owner(
    descs, row_block, accumulator, row, column, tile: tl.constexpr, NUM_RANKS: tl.constexpr
):
    """Store a tile of ``row_block`` through its owner's descriptor."""
    desc = descs[0]
    for owner in tl.static_range(1, NUM_RANKS):
        if row_block == owner:
            desc = descs[owner]
    store_tile(desc, accumulator, 0, row, column, tile.SUBTILE, tile.M, tile.N)


@jit
def multiply_described(a_desc, b_desc, row, column, K, tile: tl.constexpr):
    """The tile of the product at ``row`` and ``column``, fp32."""
    PRECISION: tl.constexpr = tile.PRECISION
    return multiply_tile(
        a_desc, b_desc, row, column, K, 0, 1,
        tile.B_COLUMN_MAJOR, PRECISION, tile.M, tile.N, tile.K,
    )  # fmt: skip


@jit(do_not_specialize=["M", "rows", "chunk_tiles_m", "rank"])
def kernel_gemm_scatter_non_persistent(
    a_ptr,
    b_ptr,
    strides,
    slot,
    out,
    N,
    K,
    M,
    rows,
    chunk_tiles_m,
    rank,
    tile: tl.constexpr,
    summing: tl.constexpr,
):
    """One tile a program on pointers, for any strides of A and B; grid (tiles,)."""
    NUM_RANKS: tl.constexpr = summing.NUM_RANKS
    PRECISION: tl.constexpr = tile.PRECISION
    tiles_m, tiles_n = tl.cdiv(rows, tile.M), tl.cdiv(N, tile.N)
    row_block, number, m, n = tile_in_scatter_order(
        tl.program_id(0), rank, NUM_RANKS, tiles_m, tiles_n,
        chunk_tiles_m if summing.SCATTER == "all" else tiles_m, tile.GROUP_M,
    )  # fmt: skip
    unit = m // chunk_tiles_m if summing.SCATTER == "row_block" else number
    row, column = m * tile.M, n * tile.N
    a_row_block_ptr = a_ptr + row_block.to(tl.int64) * rows * strides.am
    rows_left = min(rows, M - row_block * rows) - row
    accumulator = multiply_tile_by_pointers(
        a_row_block_ptr, b_ptr, row, rows_left, column, N, K,
        strides.am, strides.ak, strides.bk, strides.bn, PRECISION, tile.M, tile.N, tile.K,
        tile.INT64_OFFSETS,
    )  # fmt: skip
    store_tile_by_pointers(
        target_at(slot.targets, row_block, slot.partials), accumulator, row, column, rows, N,
        summing.SCATTER == "add", tile.M, tile.N, tile.INT64_OFFSETS,
    )  # fmt: skip
    if row_block != rank:
        announce_tile(slot, M, row_block, unit, rank, summing)
    else:
        token = await_partials(slot, M, unit, rank, NUM_RANKS)
        own_rows = min(rows, M - rank * rows)
        add_own_tile(slot, out, row, column, rows, own_rows, N, token, rank, tile, summing)
        if summing.SCATTER == "all":
            announce_to_all(out, slot, M, unit, rank, NUM_RANKS)


def scattered_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    bias: torch.Tensor | None,
    config: triton.Config,
    to: Scattering,
    *,
    kernel: Any,
    num_sms: int,
    persistent: bool,
    num_chunks: int = 1,
) -> Launch:
    """The launch that computes ``A @ B``, scatters its tiles, and sums the own rows into C.

    Args:
        A: [M, K]. B: [K, N], any strides, both. C: [M / num_ranks, N], the own rows of the sum;
            of ``"all"`` [M, N], of which the own ones are written. Contiguous.
        bias: [N], added to the sum; contiguous.
        kernel: the persistent one, on descriptors.
        config, num_sms, persistent: as for ``sharded_gemm``; an A that is not contiguous goes to
            the kernel on pointers too.
        num_chunks: of a row block: each pushed for itself, or of ``"all"`` in turn with those of
            the other row blocks.
    """
    A = normalise_strides(A)
    M, K = A.shape
    rows, N = to.rows(M), C.shape[1]
    tiles_per_row_block = tiles_of_row_block(config, rows, N)
    tiles = to.num_ranks * tiles_per_row_block
    tile, options = tile_of(config, A, B)
    summing, chunk_tiles_m, group_size_m = summing_of(C, config, to, rows, num_chunks)
    tile = tile._replace(GROUP_M=group_size_m)
    memory, where = to.regions(C, bias), (N, K, M, rows, chunk_tiles_m, to.rank)
    # A row block of partials is a matrix like C: what TMA can do with one, it can do with the
    # other.
    by_descriptor = persistent and tile.PRECISION != "ieee" and A.is_contiguous()
    if by_descriptor and fits_descriptor(A, B, C):
        # A chunk is pushed after its last tile, which is to be announced at once where the next one
        # is a large part of all.
        later = to.scatter in ("tile", "all") or tiles_per_row_block >= _MANY_WAVES * num_sms
        summing = summing._replace(LATER=later and to.scatter != "add")
        return Launch(
            kernel,
            (min(num_sms, tiles),),
            (A, B, max(B.stride()), *memory, *where),
            {**options, "NUM_SMS": num_sms, "tile": tile, "summing": summing},
        )
    # By pointers it is read and stored in one way.
    tile = tile._replace(SUBTILE=False, B_COLUMN_MAJOR=False)
    return Launch(
        kernel_gemm_scatter_non_persistent,
        (tiles,),
        (A, B, Strides(*A.stride(), *B.stride()), *memory, *where),
        {**options, "tile": tile, "summing": summing},
    )
