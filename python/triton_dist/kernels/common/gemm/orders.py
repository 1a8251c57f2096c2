"""Orders in which the tiles of a GEMM are visited."""

from __future__ import annotations

import triton.language as tl

from triton_dist._jit import jit


@jit
def tile_in_group(tile, num_tiles_m, num_tiles_n, GROUP_SIZE_M: tl.constexpr):
    """(m, n) of the ``tile``-th tile: down ``GROUP_SIZE_M`` rows of tiles, then on to the next
    column.

    Tiles that run at the same time then share rows of A and columns of B in the L2 cache (grouped
    ordering of the Triton matmul tutorial).
    """
    width = GROUP_SIZE_M * num_tiles_n
    first_m = tile // width * GROUP_SIZE_M
    group_m = min(num_tiles_m - first_m, GROUP_SIZE_M)
    return first_m + tile % width % group_m, tile % width // group_m


@jit
def shard_in_arrival_order(position, rank, num_ranks):
    """The ``position``-th shard: the own one first, then rank + 1, rank + 2, … as producers
    deliver."""
    return (rank + position) % num_ranks


@jit
def gathered_tile(
    tile,
    num_ranks,
    num_tiles_m,
    num_tiles_n,
    GROUP_SIZE_SHARDS: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """(position of the shard, m, n) of the ``tile``-th tile of the gathered shards.

    ``GROUP_SIZE_SHARDS`` shards that arrive one after another are visited as one of as many times
    the rows. Shards of few rows, one by one, would each read all of B anew.
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
def slab_in_scatter_order(position, rank, num_ranks):
    """The ``position``-th slab of rows: rank + 1's first, the own one last, so that every rank
    receives from one peer at a time and has all of its parts when it comes to its own rows."""
    return (rank + 1 + position) % num_ranks


@jit
def tile_in_scatter_order(
    index, rank, num_ranks, tiles_m, tiles_n, chunk_tiles_m, GROUP_SIZE_M: tl.constexpr
):
    """(slab, number of the tile in its slab, m, n) of the ``index``-th tile of all slabs of
    ``tiles_m`` by ``tiles_n`` tiles.

    Slabs are cut in chunks of ``chunk_tiles_m`` rows of tiles, the last maybe less. Of each chunk
    come all slabs, in scatter order; then the next chunk. Every rank has the same chunk of the same
    slab at one place of this order, but for the turn of the slabs within a chunk: the owner comes
    to it last.
    """
    chunk_tiles = chunk_tiles_m * tiles_n
    chunk = index // (num_ranks * chunk_tiles)
    rows_of_tiles = min(tiles_m - chunk * chunk_tiles_m, chunk_tiles_m)
    inside = index - chunk * num_ranks * chunk_tiles
    slab = slab_in_scatter_order(inside // (rows_of_tiles * tiles_n), rank, num_ranks)
    tile = inside % (rows_of_tiles * tiles_n)
    m, n = tile_in_group(tile, rows_of_tiles, tiles_n, GROUP_SIZE_M)
    return slab, chunk * chunk_tiles + tile, chunk * chunk_tiles_m + m, n
