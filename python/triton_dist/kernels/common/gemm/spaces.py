"""Tile configs that the tuner tries for GEMMs, and checks whether a config fits the operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, FP8, Recipe, scaling_of
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import fits_descriptor
from triton_dist.runtime.peaks import device_peak, get_tensorcore_tflops
from triton_dist.runtime.triton_compat import compiles_for_hopper, has_gluon_for_hopper

LOWEST_TILE_ROWS = 16
"""BLOCK_SIZE_M of the smallest tiles, for few rows."""
# Largest number of rows for which tiles of 16 rows are tried. These tiles read B once per 16 rows.
_FEW_ROWS = 64
# Maximum registers per thread for the accumulator and partial sum of an fp8 tile. More would spill.
_MAX_PROMOTED_REGISTERS = 192
# A GEMM counts as compute-bound if its arithmetic takes this many times as long as its memory
# traffic.
_COMPUTE_BOUND = 2.0


def max_rows_of_key(rows: int, num_ranks: int = 1) -> int:
    """Return the maximum rows per rank of all calls that share a tuning key with ``rows`` rows.

    One key covers a range of M, the rows of all ranks.
    """
    return tune.fine_bucket(rows * num_ranks) // num_ranks


def config_for(
    config: triton.Config, dtype: torch.dtype, out_dtype: torch.dtype | None = None
) -> triton.Config:
    """Return the config that is launched for operands of ``dtype``.

    Configs are written for 16-bit operands. For 4-byte operands, BLOCK_SIZE_K is halved and a
    tile's output is staged in two halves, so that the tile takes the same shared memory. For fp8
    operands, BLOCK_SIZE_K is doubled, up to 128, the length of a block of scales.
    """
    if dtype.itemsize == 2:
        return config
    tile = dict(config.kwargs)
    if dtype.itemsize == 1:
        tile["BLOCK_SIZE_K"] = min(2 * tile["BLOCK_SIZE_K"], BLOCK_ELEMENTS)
    else:
        tile["BLOCK_SIZE_K"] = tile["BLOCK_SIZE_K"] * 2 // dtype.itemsize
    if (out_dtype or dtype).itemsize == 4:
        tile["EPILOGUE_SUBTILE"] = True
    return triton.Config(tile, num_warps=config.num_warps, num_stages=config.num_stages)


def can_specialize_warps(dtype: torch.dtype) -> bool:
    """Return whether this device can run ``kernel_gemm_warp_specialized``: 16-bit or fp8 operands,
    compiled, sm_90."""
    return dtype.itemsize <= 2 and compiles_for_hopper() and has_gluon_for_hopper()


def tiles(*rows: tuple[int, ...]) -> tuple[triton.Config, ...]:
    """Build configs from (BLOCK_SIZE_M, N, K, warps, stages, GROUP_SIZE_M[, EPILOGUE_SUBTILE])."""
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K")
    return tuple(
        triton.Config(
            {**dict(zip(names, row, strict=False)), "GROUP_SIZE_M": row[5]}
            | ({"EPILOGUE_SUBTILE": bool(row[6])} if len(row) > 6 else {}),
            num_warps=row[3],
            num_stages=row[4],
        )
        for row in rows
    )


PERSISTENT_TILES = tiles(
    (128, 256, 64, 8, 3, 8, 0),
    (128, 256, 64, 8, 4, 8, 1),
    (128, 256, 64, 8, 3, 16, 0),
    (128, 256, 64, 8, 3, 4, 0),
    (256, 128, 64, 8, 3, 8, 0),
    (128, 128, 64, 8, 4, 8, 0),
    (128, 128, 64, 4, 4, 8, 0),
    (128, 128, 128, 8, 3, 8, 0),
    (64, 256, 64, 4, 4, 8, 0),
    (64, 128, 64, 4, 5, 8, 0),
    (64, 128, 128, 4, 4, 8, 0),
    (64, 64, 128, 4, 4, 8, 0),
    (128, 256, 64, 8, 3, 1, 0),
)
POINTER_TILES = tiles(
    (128, 256, 64, 8, 3, 8),
    (128, 128, 64, 8, 3, 8),
    (128, 128, 32, 4, 4, 8),
    (128, 64, 64, 4, 3, 8),
    (64, 128, 64, 4, 3, 8),
    (64, 64, 64, 4, 4, 8),
    (128, 128, 64, 8, 3, 1),
)
# With EPILOGUE_SUBTILE the two halves of an output tile share staging memory: the second half waits
# until the first is stored. The saved shared memory is enough for a fourth pipeline stage.
WARP_SPECIALIZED_TILES = tuple(
    triton.Config(
        config.kwargs | {"WARP_SPECIALIZED": True}, num_warps=8, num_stages=config.num_stages
    )
    for config in tiles(
        (128, 256, 64, 8, 3, 8, 0),
        (128, 256, 64, 8, 3, 16, 0),
        (128, 256, 64, 8, 4, 8, 1),
        (256, 128, 64, 8, 4, 8, 1),
        (128, 128, 64, 8, 5, 8, 0),
    )
)
# Small tiles: the small matrices of interpreted tests then have several tiles, some of them
# partial.
INTERPRETED_TILES = tiles((32, 64, 64, 4, 2, 2), (16, 32, 64, 4, 2, 4), (64, 64, 32, 4, 2, 1))


def get_config_space(persistent: bool = True) -> list[triton.Config]:
    """Return the tile configs to try on this device; the first is the default.

    Args:
        persistent: whether to return configs of the persistent kernel, which uses descriptors,
            instead of the pointer kernel.
    """
    if current_device().interprets:
        return list(INTERPRETED_TILES)
    return list(PERSISTENT_TILES if persistent else POINTER_TILES)


def persistent_values() -> tuple[bool, ...]:
    """Return the values of ``persistent`` to try on this device, the preferred one first.

    From compute capability 9.0 on, only the persistent kernel is tried: the pointer kernel won 1 of
    1,884 tunings on 2 and 4 H100 and H200. Operands that TMA cannot read still run on the pointer
    kernel, with the tile sizes of the persistent kernel.
    """
    device = current_device()
    if device.prefers_descriptors or device.interprets:
        return (device.prefers_descriptors,)
    return (False, True)


def tiles_with_persistent(
    tiles_of: Callable[[bool], Sequence[triton.Config]],
) -> Iterator[tuple[triton.Config, bool]]:
    """Yield (config, ``persistent``) to try on this device. ``tiles_of(persistent)`` returns the
    configs of a kernel."""
    return ((each, value) for value in persistent_values() for each in tiles_of(value))


def tile_shapes(configs: Sequence[triton.Config]) -> list[triton.Config]:
    """Return the first config of each tile shape, ignoring GROUP_SIZE_M."""
    first_by_shape: dict[Any, triton.Config] = {}
    for config in configs:
        options = dict(config.all_kwargs(), GROUP_SIZE_M=None)
        first_by_shape.setdefault(tuple(options.items()), config)
    return list(first_by_shape.values())


def warp_specialized_tiles() -> list[triton.Config]:
    """Return the configs of the warp-specialized kernel, or none if the device cannot run it."""
    return list(WARP_SPECIALIZED_TILES) if can_specialize_warps(torch.bfloat16) else []


# Tiles for GEMMs that multiply and sum in one launch (``scatter/one_launch.py``).

# Maximum accumulator values per warp if a tile is sent to all ranks. With more values, the
# addresses of peers spill.
_MAX_VALUES_PER_WARP = 64 * 128 // 4

# With few rows the time to read B limits the GEMM. Narrow tiles then fill one wave of 132 SMs for N
# from 4096 to 16384, and deep pipelines keep many loads in flight.
_FEW_ROWS_TILES = tiles(
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
_FEW_ROWS_POINTER_TILES = tiles((16, 64, 128, 4, 3, 8), (16, 128, 64, 4, 4, 8))


def _with_free_registers(configs: Sequence[triton.Config]) -> list[triton.Config]:
    """Return the first config of each tile shape that has at most ``_MAX_VALUES_PER_WARP``."""

    def values_per_warp(config: triton.Config) -> int:
        tile = config.kwargs
        return int(tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // config.num_warps)

    return [
        config for config in tile_shapes(configs) if values_per_warp(config) <= _MAX_VALUES_PER_WARP
    ]


TILES_TO_ALL = (*_FEW_ROWS_TILES, *_with_free_registers(PERSISTENT_TILES))
POINTER_TILES_TO_ALL = (*_FEW_ROWS_POINTER_TILES, *_with_free_registers(POINTER_TILES))
TILES_TO_OWNERS = (*_FEW_ROWS_TILES, *tile_shapes(PERSISTENT_TILES))
POINTER_TILES_TO_OWNERS = (*_FEW_ROWS_POINTER_TILES, *tile_shapes(POINTER_TILES))


def tiles_to_all(persistent: bool) -> Sequence[triton.Config]:
    """Return the configs to try on this device for ops that send each tile to all ranks."""
    if current_device().interprets:
        return tile_shapes(INTERPRETED_TILES)
    return TILES_TO_ALL if persistent else POINTER_TILES_TO_ALL


def tiles_to_owners(persistent: bool) -> Sequence[triton.Config]:
    """Return the configs to try on this device for ops that send each row to its owner rank."""
    if current_device().interprets:
        return tile_shapes(INTERPRETED_TILES)
    return TILES_TO_OWNERS if persistent else POINTER_TILES_TO_OWNERS


def fits_rows(tiles: triton.Config, rows: int) -> bool:
    """Return whether a config's BLOCK_SIZE_M suits ``rows``.

    Tiles must not be much taller than ``rows``, nor so low that B is read too often.
    """
    block_m = tiles.kwargs["BLOCK_SIZE_M"]
    if current_device().interprets:
        return True
    return bool(
        rows <= _FEW_ROWS if block_m == LOWEST_TILE_ROWS else block_m <= 64 or block_m < 2 * rows
    )


def _gemm_config(config: Mapping[str, Any]) -> triton.Config:
    configs = [value for value in config.values() if isinstance(value, triton.Config)]
    if len(configs) != 1:
        raise InvalidArgument(
            "prune", "config", config, "a config that holds exactly one triton.Config"
        )
    return configs[0]


def prune_fn_by_shared_memory(
    config: Mapping[str, Any], /, A: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Return whether the pipelined tiles of A and B fit the device's shared memory per block.

    The check counts ``num_stages`` tiles of A and B in A's dtype, without the memory of the
    epilogue. If the compiler cannot reuse the tiles' memory for the epilogue, compiling may fail.
    """
    gemm = _gemm_config(config)
    tile = gemm.kwargs
    elements = (tile["BLOCK_SIZE_M"] + tile["BLOCK_SIZE_N"]) * tile["BLOCK_SIZE_K"]
    return bool(
        A.element_size() * elements * gemm.num_stages <= current_device().shared_memory_bytes()
    )


def prune_fn_by_group_size_m(
    config: Mapping[str, Any], /, A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Return ``False`` for ``GROUP_SIZE_M = 1`` if the roofline shows a compute-bound GEMM.

    Without grouping, concurrent tiles share too little data in the L2 cache. If an argument has the
    attribute ``num_ranks``, A is [M_per_rank, K], and M counts the rows of all ranks.
    """
    if _gemm_config(config).kwargs.get("GROUP_SIZE_M") != 1:
        return True
    ranks = next(
        (arg.num_ranks for arg in (*args, *kwargs.values()) if hasattr(arg, "num_ranks")), 1
    )
    M, K, N = A.shape[0] * ranks, A.shape[1], B.shape[1]
    arithmetic = 2.0 * M * N * K / (get_tensorcore_tflops(A.dtype) * 1e12)
    traffic = (M * K + K * N + M * N) * A.element_size() / (device_peak().memory_gbps * 1e9)
    return arithmetic / traffic <= _COMPUTE_BOUND


def fits_registers(tiles: triton.Config, recipe: Recipe | None, use_fast_accum: bool) -> bool:
    """Return whether the accumulator and the partial sum of an fp8 tile fit in registers."""
    if use_fast_accum and recipe is not Recipe.BLOCK:
        return True
    block_n = tiles.kwargs["BLOCK_SIZE_N"]
    accumulator = tiles.kwargs["BLOCK_SIZE_M"] * block_n // (32 * tiles.num_warps)
    if tiles.kwargs.get("WARP_SPECIALIZED"):
        return "SPLIT_K" not in tiles.kwargs  # the kernel cannot split K if it sums parts in fp32
    # Without scales per block, only the partial sum of one instruction (64 rows) exists at a time.
    partial = accumulator if recipe is Recipe.BLOCK else min(accumulator, block_n // 2)
    return bool(accumulator + partial <= _MAX_PROMOTED_REGISTERS)


def fits_gemm(
    config: Mapping[str, Any], /, A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Return whether a config fits in shared memory and is worth trying.

    A warp-specialized config requires operands that TMA can read. Other operands would run another
    kernel.
    """
    if A.dtype in FP8:
        scaling = scaling_of(**kwargs)
        recipe = scaling.recipe(A, B)
        if not fits_registers(_gemm_config(config), recipe, scaling.use_fast_accum):
            return False
    if _gemm_config(config).kwargs.get("WARP_SPECIALIZED") and not (
        can_specialize_warps(A.dtype)
        and A.is_contiguous()
        and fits_descriptor(A, B)
        and B.shape[1] * 2 % 16 == 0  # rows of C
        and scaling_of(**kwargs).output_dtype(A).itemsize == 2
    ):
        return False
    launched = {"gemm_config": config_for(_gemm_config(config), A.dtype)}
    return prune_fn_by_shared_memory(launched, A) and prune_fn_by_group_size_m(
        launched, A, B, *args, **kwargs
    )
