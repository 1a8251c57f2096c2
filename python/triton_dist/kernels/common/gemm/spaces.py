"""Tiles that tunings try, by what the product is for, and which of them suit a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.launch import fits_descriptor
from triton_dist.runtime.device import current_device
from triton_dist.runtime.peaks import device_peak, get_tensorcore_tflops
from triton_dist.runtime.triton_compat import compiles_for_hopper, has_gluon_for_hopper

LOW = 16
"""Rows of the lowest tiles, which are for few rows."""
# Rows up to which tiles of so few are worth trying: they read B once for each 16.
_FEW_ROWS = 64
# Operations that a memory access must be worth before a GEMM counts as compute-bound: time of the
# arithmetic over time of the traffic.
_COMPUTE_BOUND = 2.0


def most_rows(rows: int, num_ranks: int = 1) -> int:
    """The most rows of each of ``num_ranks`` in the range of M that the tuner puts ``rows`` in."""
    return tune.fine_bucket(rows * num_ranks) // num_ranks


def config_for(config: triton.Config, dtype: torch.dtype) -> triton.Config:
    """The config that is launched for operands of ``dtype``.

    Configs are written for 16-bit operands. Of 4-byte ones a tile has half as many elements along K
    and stages its output in two halves, so that it takes as many bytes of shared memory.
    """
    if dtype.itemsize <= 2:
        return config
    tile = dict(config.kwargs)
    tile["BLOCK_SIZE_K"] = tile["BLOCK_SIZE_K"] * 2 // dtype.itemsize
    tile["EPILOGUE_SUBTILE"] = True
    return triton.Config(tile, num_warps=config.num_warps, num_stages=config.num_stages)


def can_specialize_warps(dtype: torch.dtype) -> bool:
    """Tell whether ``kernel_gemm_warp_specialized`` can multiply ``dtype`` on this process's
    device: 16-bit operands on compute capability 9.x, not interpreted."""
    return dtype.itemsize == 2 and compiles_for_hopper() and has_gluon_for_hopper()


def tiles(*rows: tuple[int, ...]) -> tuple[triton.Config, ...]:
    """Configs from (BLOCK_SIZE_M, _N, _K, num_warps, num_stages, GROUP_SIZE_M[,
    EPILOGUE_SUBTILE])."""
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
# With EPILOGUE_SUBTILE the second half of an output waits until the first has left the staging
# memory, but a fourth stage fits.
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
# Small, so that matrices that the interpreter can do in time have several tiles, and clipped ones.
INTERPRETED_TILES = tiles((32, 64, 64, 4, 2, 2), (16, 32, 64, 4, 2, 4), (64, 64, 32, 4, 2, 1))


def get_config_space(persistent: bool = True) -> list[triton.Config]:
    """Tile shapes worth trying on this process's device; the first is the default.

    ``persistent``: for the persistent kernel on descriptors; else for the one on pointers.
    """
    if current_device().interprets:
        return list(INTERPRETED_TILES)
    return list(PERSISTENT_TILES if persistent else POINTER_TILES)


def kinds_here() -> tuple[bool, ...]:
    """Return the values of ``persistent`` worth trying on this process's device, the preferred one
    first.

    Where the kernel on descriptors is preferred, from compute capability 9.0 on, the kernel on
    pointers is not tried: it won 1 of 1,884 tunings on 2 and 4 H100 and H200. Operands that TMA
    cannot read take it all the same, with the tiles of the other kernel.
    """
    device = current_device()
    if device.prefers_descriptors or device.interprets:
        return (device.prefers_descriptors,)
    return (False, True)


def of_both_kinds(
    tiles_of: Callable[[bool], Sequence[triton.Config]],
) -> Iterator[tuple[triton.Config, bool]]:
    """Yield (tiles, ``persistent``) for each kind of kernel worth trying here; ``tiles_of`` returns
    the tiles of one kind."""
    return ((each, kind) for kind in kinds_here() for each in tiles_of(kind))


def tile_shapes(configs: Sequence[triton.Config]) -> list[triton.Config]:
    """The first config of each tile shape, whatever its GROUP_SIZE_M."""
    found: dict[Any, triton.Config] = {}
    for config in configs:
        options = dict(config.all_kwargs(), GROUP_SIZE_M=None)
        found.setdefault(tuple(options.items()), config)
    return list(found.values())


def warp_specialized_tiles() -> list[triton.Config]:
    """Tiles for the persistent kernel with specialised warps; none where it cannot be compiled."""
    return list(WARP_SPECIALIZED_TILES) if can_specialize_warps(torch.bfloat16) else []


# Tiles of products that one launch multiplies and adds (``scatter/one_launch.py``).

# Most accumulator values per warp of a tile sent to all ranks; above it the peers' addresses spill.
_MOST_VALUES_OF_A_WARP = 64 * 128 // 4

# A product of few rows takes as long as reading B: deep pipelines of narrow tiles, one wave of
# them on 132 multiprocessors at N = 4096 to 16384.
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
    """The first of each tile shape, if few enough values are each thread's."""

    def values_of_a_warp(config: triton.Config) -> int:
        tile = config.kwargs
        return int(tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"] // config.num_warps)

    return [
        config
        for config in tile_shapes(configs)
        if values_of_a_warp(config) <= _MOST_VALUES_OF_A_WARP
    ]


TILES_TO_ALL = (*_FEW_ROWS_TILES, *_with_free_registers(PERSISTENT_TILES))
POINTER_TILES_TO_ALL = (*_FEW_ROWS_POINTER_TILES, *_with_free_registers(POINTER_TILES))
TILES_TO_OWNERS = (*_FEW_ROWS_TILES, *tile_shapes(PERSISTENT_TILES))
POINTER_TILES_TO_OWNERS = (*_FEW_ROWS_POINTER_TILES, *tile_shapes(POINTER_TILES))


def tiles_to_all(persistent: bool) -> Sequence[triton.Config]:
    """Tiles that go to all ranks, on this process's device."""
    if current_device().interprets:
        return tile_shapes(INTERPRETED_TILES)
    return TILES_TO_ALL if persistent else POINTER_TILES_TO_ALL


def tiles_to_owners(persistent: bool) -> Sequence[triton.Config]:
    """Tiles whose rows go to their owners, on this process's device."""
    if current_device().interprets:
        return tile_shapes(INTERPRETED_TILES)
    return TILES_TO_OWNERS if persistent else POINTER_TILES_TO_OWNERS


def fits_rows(tiles: triton.Config, rows: int) -> bool:
    """Tell whether tiles are neither much higher than ``rows``, nor so low that B is read often."""
    block_m = tiles.kwargs["BLOCK_SIZE_M"]
    if current_device().interprets:
        return True
    return bool(rows <= _FEW_ROWS if block_m == LOW else block_m <= 64 or block_m < 2 * rows)


def _gemm_config(config: Mapping[str, Any]) -> triton.Config:
    """The one ``triton.Config`` in ``config``, under any name."""
    found = [value for value in config.values() if isinstance(value, triton.Config)]
    if len(found) != 1:
        raise InvalidArgument(
            "prune", "config", config, "a config that holds exactly one triton.Config"
        )
    return found[0]


def prune_fn_by_shared_memory(
    config: Mapping[str, Any], /, A: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Keep a config whose pipelined tiles of A and B fit the device's shared memory per block.

    Counts ``num_stages`` tiles of A and of B in A's dtype; what the epilogue stages comes on top
    where the compiler cannot reuse them, and then shows as a failed compilation.
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
    """Drop ``GROUP_SIZE_M = 1`` where the roofline says that the GEMM is compute-bound, and nothing
    else.

    A [M_per_rank, K] is gathered by an op with a context: with ``num_ranks`` on any argument, M is
    the gathered one. Without grouping, tiles that run together share too little of the L2 cache.
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


def fits_gemm(
    config: Mapping[str, Any], /, A: torch.Tensor, B: torch.Tensor, *args: Any, **kwargs: Any
) -> bool:
    """Keep configs that fit shared memory as launched for A's dtype, are worth trying, and would
    not fall back to another kernel: specialised warps need 16-bit operands that TMA can read."""
    if _gemm_config(config).kwargs.get("WARP_SPECIALIZED") and not (
        can_specialize_warps(A.dtype)
        and A.is_contiguous()
        and fits_descriptor(A, B)
        and B.shape[1] * B.element_size() % 16 == 0  # rows of the product
    ):
        return False
    launched = {"gemm_config": config_for(_gemm_config(config), A.dtype)}
    return prune_fn_by_shared_memory(launched, A) and prune_fn_by_group_size_m(
        launched, A, B, *args, **kwargs
    )
