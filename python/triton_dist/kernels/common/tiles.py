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
def slab_in_scatter_order(position, rank, num_ranks):
    """The ``position``-th slab of rows: rank + 1's first, the own one last, so that every rank
    receives from one peer at a time and has all of its parts when it comes to its own rows."""
    return (rank + 1 + position) % num_ranks
