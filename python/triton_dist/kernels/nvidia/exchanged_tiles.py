"""Tiles of products that one launch multiplies and adds (``exchanged_gemm.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import triton

from triton_dist.kernels.nvidia import gemm
from triton_dist.runtime.device import current_device

# Most accumulator values per warp of a tile sent to all ranks; above it the peers' addresses spill.
_MOST_VALUES_OF_A_WARP = 64 * 128 // 4
LOW = 16
"""Rows of the lowest tiles, which are for few rows."""
# Rows up to which tiles of so few are worth trying: they read B once for each 16.
_FEW_ROWS = 64

# A product of few rows takes as long as reading B: deep pipelines of narrow tiles, one wave of
# them on 132 multiprocessors at N = 4096 to 16384.
_FEW_ROWS_TILES = gemm.tiles(
    (16, 32, 128, 4, 5, 8),
    (16, 32, 256, 4, 4, 8),
    (16, 64, 64, 4, 5, 8),
    (16, 64, 128, 4, 5, 8),
    (16, 64, 256, 4, 5, 8),
    (16, 128, 128, 4, 4, 8),
    (64, 32, 128, 4, 5, 8),
    (64, 32, 256, 4, 4, 8),
    (64, 64, 64, 4, 5, 8),
    (64, 64, 256, 4, 3, 8),
)
_FEW_ROWS_POINTER_TILES = gemm.tiles((16, 64, 128, 4, 3, 8), (16, 128, 64, 4, 4, 8))


def _with_free_registers(configs: Sequence[triton.Config]) -> list[triton.Config]:
    """The first of each tile shape, if few enough values are each thread's."""

    def values_of_a_warp(config: triton.Config) -> int:
        tile = config.kwargs
        return int(tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // config.num_warps)

    return [
        config
        for config in gemm.tile_shapes(configs)
        if values_of_a_warp(config) <= _MOST_VALUES_OF_A_WARP
    ]


TILES_TO_ALL = (*_FEW_ROWS_TILES, *_with_free_registers(gemm.PERSISTENT_TILES))
POINTER_TILES_TO_ALL = (*_FEW_ROWS_POINTER_TILES, *_with_free_registers(gemm.POINTER_TILES))
TILES_TO_OWNERS = (*_FEW_ROWS_TILES, *gemm.tile_shapes(gemm.PERSISTENT_TILES))
POINTER_TILES_TO_OWNERS = (*_FEW_ROWS_POINTER_TILES, *gemm.tile_shapes(gemm.POINTER_TILES))


def tiles_to_all(persistent: bool) -> Sequence[triton.Config]:
    """Tiles that go to all ranks, on this process's device."""
    if current_device().name == "cpu":
        return gemm.tile_shapes(gemm.INTERPRETED_TILES)
    return TILES_TO_ALL if persistent else POINTER_TILES_TO_ALL


def tiles_to_owners(persistent: bool) -> Sequence[triton.Config]:
    """Tiles whose rows go to their owners, on this process's device."""
    if current_device().name == "cpu":
        return gemm.tile_shapes(gemm.INTERPRETED_TILES)
    return TILES_TO_OWNERS if persistent else POINTER_TILES_TO_OWNERS


def suits_rows(tiles: triton.Config, rows: int) -> bool:
    """Whether tiles are neither much higher than ``rows``, nor so low that B is read often."""
    block_m = tiles.kwargs["BLOCK_SIZE_M"]
    if current_device().name == "cpu":
        return True
    return bool(rows <= _FEW_ROWS if block_m == LOW else block_m <= 64 or block_m < 2 * rows)
