"""Predict the time of a GEMM, and of an op around it, from tiles and the peaks of the device.

The kernels compute one tile per SM at a time, in waves over all tiles. A step along K takes about
the longest of three times: the tensor cores, the reads of A and B into the SM, and the latency of
memory divided by the steps in flight. Device memory limits all SMs together.

The constants were fitted to one half of the measurements that ``benchmarks/bench_prior.py`` reads.
The benchmark checks them on both halves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton

from triton_dist.kernels.common.gemm.spaces import config_for
from triton_dist.runtime.peaks import RELATIVE_RATE, device_peak

# Share of the peak that tensor cores reach. Each instruction costs as much as 18 more columns.
_TENSOR_CORES, _EXTRA_COLUMNS = 0.93, 18
_SM_GBPS = 120.0  # into one SM: 64 bytes per clock
_LATENCY_US = 0.86
# Relative time of a step in the warp-specialized kernel, and in the kernel on pointers.
_SPECIALIZED, _POINTERS = 0.94, 1.3
_ZERO_FILL_GBPS = 1200.0  # of rows beyond the end of A by TMA, for all SMs together
_TILE_US, _STORE_US = 2.3, 77e-6  # outside of a tile's steps: in total, and per element
_MISSES = 0.4  # share of the data of later waves that is no longer in the L2 cache
# Times that overlap are combined by a p-norm. First p: in an SM; second: with memory or a link.
_ORDER_IN_SM, _ORDER = 8.0, 3.0
_LAUNCH_US, _SPLIT_US = 2.0, 16.0
# Shares of the peaks that a library's GEMM and a transfer reach. A library's grouped GEMM takes
# ``_GROUPED_US`` in addition to its product and copies.
_LIBRARY_FLOPS, _LIBRARY_MEMORY, _LINK, _GROUPED_US = 0.78, 0.875, 0.85, 60.0
_BLOCK_US, _BLOCK_BYTES = 2.0, 8192  # a program of an exchange moves this many bytes in this time


def _norm(order: float, *times: float) -> float:
    return float(sum(time**order for time in times) ** (1 / order))


@functools.lru_cache(maxsize=4096)
def gemm_ms(
    config: triton.Config, M: int, N: int, K: int, dtype: torch.dtype,
    persistent: bool = True, shards: int = 1, experts: int = 0,
) -> float:  # fmt: skip
    """Return the predicted milliseconds of [M, K] @ [K, N] in our kernels.

    Args:
        config: tiles for 16-bit operands, as in config spaces.
        persistent: use the kernel on descriptors, else the kernel on pointers.
        shards: number of parts of A's rows, which are tiled separately.
        experts: if not 0, number of parts of A's rows, each multiplied by its own B.
    """
    peak, config, shards = device_peak(), config_for(config, dtype), experts or shards
    tile, item, sms = config.kwargs, dtype.itemsize, peak.sms
    M, N = max(M, 1), max(N, 1)  # an empty product has no tiles, by whose number we divide
    block_m, block_n, block_k = (tile[f"BLOCK_SIZE_{axis}"] for axis in "MNK")
    rows = math.ceil(M / shards)
    tiles_m, tiles_n = math.ceil(rows / block_m), math.ceil(N / block_n)
    tiles, splits = tiles_m * tiles_n * shards, tile.get("SPLIT_K", 1)
    if experts and 2 * rows > block_m:  # the last tile of an expert is half full on average
        tiles = math.ceil((rows / block_m + 0.5) * tiles_n * shards)
    full, last = divmod(tiles, sms)
    waves = full + math.ceil(last * splits / sms) / splits

    tile_bytes, flops_per_us = (block_m + block_n) * block_k * item, _flops_per_us(dtype)
    concurrent = min(tile.get("PROGRAMS", 1 if persistent else 2), math.ceil(tiles / sms))
    step_us = _norm(
        _ORDER_IN_SM,
        2.0 * block_m * (block_n + _EXTRA_COLUMNS) * block_k * sms / flops_per_us / _TENSOR_CORES,
        tile_bytes / (_SM_GBPS * 1e3),
        _LATENCY_US / max(config.num_stages - 1, 1) / concurrent,
    )
    step_us *= _SPECIALIZED if tile.get("WARP_SPECIALIZED") else 1.0 if persistent else _POINTERS

    # Only the last group of tile rows has rows beyond the end of A. Its tiles run together.
    group = min(tile.get("GROUP_SIZE_M", 1), tiles_m)
    last_rows = tiles_m - (tiles_m - 1) // group * group
    last_tiles, zeros_us = last_rows * tiles_n * shards, 0.0
    if persistent and not experts:
        zeros = min(last_tiles, sms) / last_rows * (tiles_m * block_m - rows) * block_k * item
        zeros_us = zeros / (_ZERO_FILL_GBPS * 1e3)
    last_waves = min(math.ceil(last_tiles / sms), waves)
    steps_us = step_us * (waves - last_waves) + max(step_us, zeros_us) * last_waves
    tile_us = _TILE_US + block_m * block_n * _STORE_US * (2 if tile.get("EPILOGUE_SUBTILE") else 1)
    compute_us = math.ceil(K / block_k) * steps_us + waves * tile_us

    columns = min(math.ceil(min(tiles, sms) / group), tiles_n)
    wave_bytes = (min(group * block_m, M) + min(columns * block_n, N)) * K * item
    once = (M * K + K * N * max(experts, 1) + M * N) * item
    memory_us = (once + _MISSES * max(waves * wave_bytes - once, 0.0)) / (peak.memory_gbps * 1e3)
    overhead_us = _LAUNCH_US + (_SPLIT_US if waves % 1 else 0.0)
    return (overhead_us + _norm(_ORDER, compute_us, memory_us)) / 1e3


def library_ms(M: int, N: int, K: int, dtype: torch.dtype, experts: int = 0) -> float:
    """Return the predicted milliseconds of [M, K] @ [K, N] in a library with unknown tiles.

    With ``experts``, predict a grouped GEMM between copies that sort the rows and restore their
    order.
    """
    byte_us = 1 / (device_peak().memory_gbps * 1e3 * _LIBRARY_MEMORY)
    compute_us = 2.0 * M * N * K / _flops_per_us(dtype) / _LIBRARY_FLOPS
    total_us = max(compute_us, (M * K + K * N + M * N) * dtype.itemsize * byte_us) + _LAUNCH_US
    if experts:
        extra = 2 * M * (K + N) + (experts - 1) * K * N  # copied rows, other experts' weights
        total_us += _GROUPED_US + extra * dtype.itemsize * byte_us
    return total_us / 1e3


def _flops_per_us(dtype: torch.dtype) -> float:
    return device_peak().tflops * RELATIVE_RATE[dtype] * 1e6


class TransferCost(NamedTuple):
    """What an algorithm costs in addition to a GEMM and the bytes of its transfer."""

    overhead_us: float
    slowdown: float
    """Relative time of the GEMM."""
    overlapping_chunks: float = math.inf
    """The transfer runs while the GEMM runs if there are at least as many chunks."""


def op_ms(
    config: Mapping[str, Any], cost: TransferCost, M: int, N: int, K: int, dtype: torch.dtype,
    received: float, shards: int = 1,
) -> float:  # fmt: skip
    """Return the predicted milliseconds of a GEMM and a transfer of ``received`` bytes per rank."""
    tiles, gbps = config.get("gemm_config"), device_peak().link_gbps * _LINK
    if tiles is not None:
        gemm = gemm_ms(tiles, M, N, K, dtype, bool(config["persistent"]), shards)
    else:
        gemm = library_ms(M, N, K, dtype)
        programs = config.get("num_comm_sms") or config.get("num_ctas") or math.inf
        gbps = min(gbps, programs * config.get("block_bytes", _BLOCK_BYTES) / (_BLOCK_US * 1e3))
    gemm, link = gemm * cost.slowdown, received / (gbps * 1e6)
    overlaps = (config.get("num_chunks") or 1) >= cost.overlapping_chunks
    return cost.overhead_us / 1e3 + _norm(_ORDER if overlaps else 1.0, gemm, link)
