"""Tile configs that the tuner tries for GEMMs, checks of a config, and predictions of its time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton

from triton_dist import tune
from triton_dist.errors import InvalidArgument
from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, FP8, Recipe, scaling_of
from triton_dist.runtime.device import current_device
from triton_dist.runtime.launch import fits_descriptor
from triton_dist.runtime.peaks import RELATIVE_RATE, device_peak, get_tensorcore_tflops
from triton_dist.runtime.triton_compat import compiles_for_hopper, has_gluon_for_hopper

MIN_TILE_ROWS = 16
"""BLOCK_SIZE_M of the smallest tiles, for few rows."""
FEW_ROWS = 64
"""Up to this number of rows, tiles of 16 rows (which read B once per 16 rows) and tiles split along
K are candidates too."""
MAX_SPLIT_K = 8
# Maximum registers per thread for the accumulator and partial sum of an fp8 tile. More would spill.
_MAX_PROMOTED_REGISTERS = 192
# A GEMM counts as compute-bound if its arithmetic takes this many times as long as its memory
# traffic.
_MIN_COMPUTE_BOUND_RATIO = 2.0


def max_rows_of_key(rows: int, num_ranks: int = 1) -> int:
    """Return the maximum rows per rank of all calls that share a tuning key with ``rows`` rows.

    One key covers a range of M, the rows of all ranks.
    """
    return tune.fine_bucket(rows * num_ranks) // num_ranks


def config_for_dtype(
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


def tile_configs(
    *rows: tuple[int, ...],
    names: tuple[str, ...] = ("GROUP_SIZE_M", "EPILOGUE_SUBTILE"),
    **constants: bool,
) -> tuple[triton.Config, ...]:
    """Build configs from (BLOCK_SIZE_M, N, K, warps, stages, …), where ``names`` are the constants
    after the stages. A row may omit the last constants. All configs also have ``constants``."""
    return tuple(
        triton.Config(
            {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k}
            | dict(zip(names, optional_constants, strict=False))
            | constants,
            num_warps=warps,
            num_stages=stages,
        )
        for m, n, k, warps, stages, *optional_constants in rows
    )


PERSISTENT_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, False),
    (128, 256, 64, 8, 4, 8, True),
    (128, 256, 64, 8, 3, 16, False),
    (128, 256, 64, 8, 3, 4, False),
    (256, 128, 64, 8, 3, 8, False),
    (128, 128, 64, 8, 4, 8, False),
    (128, 128, 64, 4, 4, 8, False),
    (128, 128, 128, 8, 3, 8, False),
    (64, 256, 64, 4, 4, 8, False),
    (64, 128, 64, 4, 5, 8, False),
    (64, 128, 128, 4, 4, 8, False),
    (64, 64, 128, 4, 4, 8, False),
    (128, 256, 64, 8, 3, 1, False),
)
POINTER_TILES = tile_configs(
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
WARP_SPECIALIZED_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, False),
    (128, 256, 64, 8, 3, 16, False),
    (128, 256, 64, 8, 4, 8, True),
    (256, 128, 64, 8, 4, 8, True),
    (128, 128, 64, 8, 5, 8, False),
    WARP_SPECIALIZED=True,
)
# Small tiles: the small matrices of interpreted tests then have several tiles, some of them
# partial.
INTERPRETED_TILES = tile_configs(
    (32, 64, 64, 4, 2, 2), (16, 32, 64, 4, 2, 4), (64, 64, 32, 4, 2, 1)
)


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
_FEW_ROWS_TILES = tile_configs(
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
# SPLIT_K programs multiply a tile (``scatter/one_launch.py``). Wide tiles read A less often.
SPLIT_TILES = tile_configs(
    *((16, 256, 64, 4, 5, 8, splits) for splits in (2, 4, 5, 8)),
    *((32, 256, 64, 8, 5, 8, splits) for splits in (4, 5)),
    *((64, 128, 64, 8, 8, 8, splits) for splits in (2, 4)),
    names=("GROUP_SIZE_M", "SPLIT_K"),
)
_FEW_ROWS_POINTER_TILES = tile_configs((16, 64, 128, 4, 3, 8), (16, 128, 64, 4, 4, 8))


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
TILES_TO_OWNERS = (*_FEW_ROWS_TILES, *SPLIT_TILES, *tile_shapes(PERSISTENT_TILES))
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
        rows <= FEW_ROWS if block_m == MIN_TILE_ROWS else block_m <= 64 or block_m < 2 * rows
    )


def fits_split(tiles: triton.Config, M: int, N: int) -> bool:
    """Return whether K is not split, or M is small and the parts of all tiles fit in one wave that
    occupies more than half of the SMs."""
    splits, sizes = tiles.kwargs.get("SPLIT_K", 1), tiles.kwargs
    num_tiles = -(-M // sizes["BLOCK_SIZE_M"]) * -(-N // sizes["BLOCK_SIZE_N"])
    num_sms = current_device().num_sms
    fits_wave = M <= FEW_ROWS and num_sms < 2 * num_tiles * splits <= 2 * num_sms
    return bool(splits == 1 or fits_wave)


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
    num_ranks = next(
        (arg.num_ranks for arg in (*args, *kwargs.values()) if hasattr(arg, "num_ranks")), 1
    )
    M, K, N = A.shape[0] * num_ranks, A.shape[1], B.shape[1]
    arithmetic = 2.0 * M * N * K / (get_tensorcore_tflops(A.dtype) * 1e12)
    traffic = (M * K + K * N + M * N) * A.element_size() / (device_peak().memory_gbps * 1e9)
    return arithmetic / traffic <= _MIN_COMPUTE_BOUND_RATIO


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
    launched_config = {"gemm_config": config_for_dtype(_gemm_config(config), A.dtype)}
    return prune_fn_by_shared_memory(launched_config, A) and prune_fn_by_group_size_m(
        launched_config, A, B, *args, **kwargs
    )


# Prediction of the time of a GEMM, and of an op around it, from tiles and the peaks of the device.
#
# The kernels compute one tile per SM at a time, in waves over all tiles. A step along K takes about
# the longest of three times: the tensor cores, the reads of A and B into the SM, and the latency of
# memory divided by the steps in flight. Device memory limits all SMs together. The constants were
# fitted to one half of the measurements that ``benchmarks/bench_prior.py`` reads. The benchmark
# checks them on both halves.

# Share of the peak that tensor cores reach. Each instruction costs as much as 18 more columns.
_TENSOR_CORE_SHARE, _EXTRA_COLUMNS = 0.93, 18
_SM_GBPS = 120.0  # into one SM: 64 bytes per clock
_LATENCY_US = 0.86  # of a load from device memory
# Relative time of a step in the warp-specialized kernel, and in the kernel on pointers.
_SPECIALIZED_FACTOR, _POINTER_FACTOR = 0.94, 1.3
_ZERO_FILL_GBPS = 1200.0  # of rows beyond the end of A by TMA, for all SMs together
_TILE_US, _ELEMENT_US = 2.3, 77e-6  # outside of a tile's steps: in total, and per element
_L2_MISS_SHARE = 0.4  # share of the data of later waves that is no longer in the L2 cache
# Times that overlap are combined by a p-norm. First p: in an SM; second: with memory or a link.
_NORM_ORDER_IN_SM, _NORM_ORDER = 8.0, 3.0
_LAUNCH_US, _SPLIT_US = 2.0, 16.0  # of a launch; of writing and reading the partials of a split
# Shares of the peaks that a library's GEMM and a transfer reach. A library's grouped GEMM takes
# ``_LIBRARY_GROUPED_US`` in addition to its product and copies.
_LIBRARY_FLOPS_SHARE, _LIBRARY_MEMORY_SHARE, _LINK_SHARE = 0.78, 0.875, 0.85
_LIBRARY_GROUPED_US = 60.0
_BLOCK_US, _BLOCK_BYTES = 2.0, 8192  # a program of an exchange moves this many bytes in this time


def _norm(order: float, *times: float) -> float:
    return float(sum(time**order for time in times) ** (1 / order))


@functools.lru_cache(maxsize=4096)
def predict_gemm_ms(
    config: triton.Config, M: int, N: int, K: int, dtype: torch.dtype,
    persistent: bool = True, num_shards: int = 1, num_experts: int = 0,
) -> float:  # fmt: skip
    """Return the predicted milliseconds of [M, K] @ [K, N] in our kernels.

    Args:
        config: tiles for 16-bit operands, as in config spaces.
        persistent: use the kernel on descriptors, else the kernel on pointers.
        num_shards: number of parts of A's rows, which are tiled separately.
        num_experts: if not 0, number of parts of A's rows, each multiplied by its own B.
    """
    peak, config = device_peak(), config_for_dtype(config, dtype)
    num_shards = num_experts or num_shards
    tile, item_bytes, sms = config.kwargs, dtype.itemsize, peak.sms
    M, N = max(M, 1), max(N, 1)  # an empty product has no tiles, by whose number we divide
    block_m, block_n, block_k = (tile[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    rows = math.ceil(M / num_shards)
    tiles_m, tiles_n = math.ceil(rows / block_m), math.ceil(N / block_n)
    num_tiles, splits = tiles_m * tiles_n * num_shards, tile.get("SPLIT_K", 1)
    if num_experts and 2 * rows > block_m:  # the last tile of an expert is half full on average
        num_tiles = math.ceil((rows / block_m + 0.5) * tiles_n * num_shards)
    num_full_waves, num_left_tiles = divmod(num_tiles, sms)
    num_waves = num_full_waves + math.ceil(num_left_tiles * splits / sms) / splits

    tile_bytes, flops_per_us = (block_m + block_n) * block_k * item_bytes, _flops_per_us(dtype)
    step_flops = 2.0 * block_m * (block_n + _EXTRA_COLUMNS) * block_k * sms
    programs_per_sm = min(tile.get("PROGRAMS", 1 if persistent else 2), math.ceil(num_tiles / sms))
    step_us = _norm(
        _NORM_ORDER_IN_SM,
        step_flops / flops_per_us / _TENSOR_CORE_SHARE,
        tile_bytes / (_SM_GBPS * 1e3),
        _LATENCY_US / max(config.num_stages - 1, 1) / programs_per_sm,
    )
    kernel_factor = 1.0 if persistent else _POINTER_FACTOR
    step_us *= _SPECIALIZED_FACTOR if tile.get("WARP_SPECIALIZED") else kernel_factor

    # Only the last group of tile rows has rows beyond the end of A. Its tiles run together.
    group = min(tile.get("GROUP_SIZE_M", 1), tiles_m)
    last_tile_rows = tiles_m - (tiles_m - 1) // group * group
    last_tiles, zero_fill_us = last_tile_rows * tiles_n * num_shards, 0.0
    if persistent and not num_experts:
        padding_rows = tiles_m * block_m - rows
        padding_bytes = min(last_tiles, sms) / last_tile_rows * padding_rows * block_k * item_bytes
        zero_fill_us = padding_bytes / (_ZERO_FILL_GBPS * 1e3)
    last_waves = min(math.ceil(last_tiles / sms), num_waves)
    steps_us = step_us * (num_waves - last_waves) + max(step_us, zero_fill_us) * last_waves
    # Two sub-tiles take two stores. Half of one overlaps, except in the warp-specialized kernel.
    num_stores = (2 if tile.get("WARP_SPECIALIZED") else 1.5) if tile.get("EPILOGUE_SUBTILE") else 1
    tile_us = _TILE_US + block_m * block_n * _ELEMENT_US * num_stores
    compute_us = math.ceil(K / block_k) * steps_us + num_waves * tile_us

    columns = min(math.ceil(min(num_tiles, sms) / group), tiles_n)
    wave_bytes = (min(group * block_m, M) + min(columns * block_n, N)) * K * item_bytes
    min_bytes = (M * K + K * N * max(num_experts, 1) + M * N) * item_bytes
    reread_bytes = _L2_MISS_SHARE * max(num_waves * wave_bytes - min_bytes, 0.0)
    memory_us = (min_bytes + reread_bytes) / (peak.memory_gbps * 1e3)
    overhead_us = _LAUNCH_US + (_SPLIT_US if num_waves % 1 else 0.0)
    return (overhead_us + _norm(_NORM_ORDER, compute_us, memory_us)) / 1e3


def predict_library_ms(M: int, N: int, K: int, dtype: torch.dtype, num_experts: int = 0) -> float:
    """Return the predicted milliseconds of [M, K] @ [K, N] in a library with unknown tiles.

    With ``num_experts``, predict a grouped GEMM between copies that sort the rows and restore their
    order.
    """
    byte_us = 1 / (device_peak().memory_gbps * 1e3 * _LIBRARY_MEMORY_SHARE)
    compute_us = 2.0 * M * N * K / _flops_per_us(dtype) / _LIBRARY_FLOPS_SHARE
    total_us = max(compute_us, (M * K + K * N + M * N) * dtype.itemsize * byte_us) + _LAUNCH_US
    if num_experts:
        extra = 2 * M * (K + N) + (num_experts - 1) * K * N  # copied rows, other experts' weights
        total_us += _LIBRARY_GROUPED_US + extra * dtype.itemsize * byte_us
    return total_us / 1e3


def _flops_per_us(dtype: torch.dtype) -> float:
    return device_peak().tflops * RELATIVE_RATE[dtype] * 1e6


class TransferCost(NamedTuple):
    """What an algorithm costs in addition to a GEMM and the bytes of its transfer."""

    overhead_us: float
    slowdown: float
    """Relative time of the GEMM."""
    overlapping_chunks: float = math.inf
    """Number of chunks from which on the transfer overlaps with the GEMM."""


def predict_op_ms(
    config: Mapping[str, Any], cost: TransferCost, M: int, N: int, K: int, dtype: torch.dtype,
    received_bytes: float, num_shards: int = 1, copies_per_block: int = 1,
) -> float:  # fmt: skip
    """Return the predicted milliseconds of a GEMM and a transfer.

    Each rank receives ``received_bytes``. A program sends each block to ``copies_per_block`` slots
    at the same time.
    """
    gemm_config, gbps = config.get("gemm_config"), device_peak().link_gbps * _LINK_SHARE
    if gemm_config is not None:
        gemm = predict_gemm_ms(gemm_config, M, N, K, dtype, bool(config["persistent"]), num_shards)
    else:
        gemm = predict_library_ms(M, N, K, dtype)
        programs = config.get("num_comm_sms") or config.get("num_ctas") or math.inf
        bytes_in_flight = programs * copies_per_block * config.get("block_bytes", _BLOCK_BYTES)
        gbps = min(gbps, bytes_in_flight / (_BLOCK_US * 1e3))
    gemm, link = gemm * cost.slowdown, received_bytes / (gbps * 1e6)
    overlaps = (config.get("num_chunks") or 1) >= cost.overlapping_chunks
    return cost.overhead_us / 1e3 + _norm(_NORM_ORDER if overlaps else 1.0, gemm, link)
