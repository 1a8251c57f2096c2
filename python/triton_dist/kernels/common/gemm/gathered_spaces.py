"""Tiles that only AllGather-GEMM tries, and which tiles fit a shape.

Tiles of a last wave that is not full are cut along K (``common/gemm/split_k.py``), in two parts.
With 2048 gathered rows, 7168 columns and K = 8192 that took 349 us on four H200 instead of 380.
More parts, smaller tiles and cuts of all waves were slower everywhere: to write and read two parts
takes 16 us.
"""

from __future__ import annotations

import torch
import triton

from triton_dist.kernels.common.gemm.launch import can_specialize_warps
from triton_dist.kernels.common.gemm.rows import most_rows
from triton_dist.kernels.common.gemm.split_k import split_tiles
from triton_dist.kernels.common.launch import dot_precision, fits_descriptor
from triton_dist.runtime.device import current_device

ALL_SHARDS = 8
# A grid of so many waves is not worth small tiles.
_MANY_WAVES = 16
# What a cut should save of the waves at least; writing and reading partials takes time too.
_LEAST_SAVING = 0.03
# Larger shards, of a bucket, are not sent by SMs: copy engines leave all of those to the GEMM.
_MOST_FUSED_ROWS = 1024
_MOST_FUSED_BYTES = 16 << 20


def _split(*rows: tuple[int, ...]) -> tuple[triton.Config, ...]:
    """Configs from (BLOCK_SIZE_M, _N, _K, num_warps, num_stages, GROUP_SIZE_M, SPLIT_K,
    GROUP_SIZE_SHARDS)."""
    names = (
        "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "SPLIT_K",
        "GROUP_SIZE_SHARDS",
    )  # fmt: skip
    return tuple(
        triton.Config(
            dict(zip(names, (m, n, k, group, parts, shards), strict=True)),
            num_warps=warps,
            num_stages=stages,
        )
        for m, n, k, warps, stages, group, parts, shards in rows
    )


SPLIT_K_TILES = _split((128, 256, 64, 8, 3, 8, 2, 1), (128, 256, 64, 8, 3, 16, 2, 1))
WARP_SPECIALIZED_SPLIT_K_TILES = tuple(
    triton.Config(
        config.kwargs | {"EPILOGUE_SUBTILE": config.num_stages > 3, "WARP_SPECIALIZED": True},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    for config in _split(
        (128, 256, 64, 8, 3, 8, 2, 1),
        (128, 256, 64, 8, 3, 16, 2, 1),
        (128, 256, 64, 8, 4, 8, 2, 1),
    )
)
# As many parts as a K of two steps has, and more; one, two and all shards at once.
INTERPRETED_SPLIT_K_TILES = _split(
    (32, 64, 64, 4, 2, 2, 2, 1),
    (16, 32, 64, 4, 2, 4, 5, ALL_SHARDS),
    (16, 32, 32, 8, 2, 4, 3, 2),
)


def _fused(*rows: tuple[int, ...]) -> tuple[tuple[triton.Config, int, int], ...]:
    """(config, num_comm_sms, num_chunks) from (BLOCK_SIZE_M, _N, _K, num_warps, num_stages,
    GROUP_SIZE_M, GROUP_SIZE_SHARDS, num_comm_sms, num_chunks)."""
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "GROUP_SIZE_SHARDS")
    return tuple(
        (
            triton.Config(
                dict(zip(names, (m, n, k, group, shards), strict=True)),
                num_warps=warps,
                num_stages=stages,
            ),
            num_comm_sms,
            num_chunks,
        )
        for m, n, k, warps, stages, group, shards, num_comm_sms, num_chunks in rows
    )


FUSED_TILES = _fused(
    (128, 256, 64, 8, 3, 8, ALL_SHARDS, 16, 4),
    (128, 256, 64, 8, 3, 8, ALL_SHARDS, 16, 2),
    (128, 256, 64, 8, 3, 8, ALL_SHARDS, 16, 8),
    (128, 256, 64, 8, 3, 8, ALL_SHARDS, 8, 4),
    (128, 256, 64, 8, 3, 8, ALL_SHARDS, 20, 4),
    (64, 256, 64, 4, 4, 8, ALL_SHARDS, 16, 4),
)
INTERPRETED_FUSED_TILES = _fused(
    (32, 64, 64, 4, 2, 2, ALL_SHARDS, 1, 2),
    (16, 32, 32, 4, 2, 4, 1, 2, 3),
)


def split_k_tiles() -> list[triton.Config]:
    """Tiles that are cut along K in the last wave, worth trying on this process's device; for the
    persistent kernel."""
    if current_device().interprets:
        return list(INTERPRETED_SPLIT_K_TILES)
    specialized = WARP_SPECIALIZED_SPLIT_K_TILES if can_specialize_warps(torch.bfloat16) else ()
    return [*SPLIT_K_TILES, *specialized]


def room_for_parts(num_sms: int) -> tuple[int, int]:
    """(fp32 elements, counters) of a workspace in which the last wave of ``num_sms`` programs can
    be cut as each of ``split_k_tiles`` says: 33 MiB for 132."""
    return max(split_tiles(config, num_sms - 1, num_sms) for config in split_k_tiles())


def fused_tiles() -> list[tuple[triton.Config, int, int]]:
    """(tiles, ``num_comm_sms``, ``num_chunks``) worth trying where the consumer sends the shard
    itself."""
    return list(INTERPRETED_FUSED_TILES if current_device().interprets else FUSED_TILES)


def fits_fused(A: torch.Tensor, B: torch.Tensor, num_ranks: int) -> bool:
    """Tell whether the consumer may be worth sending A [M_per_rank, K] itself: there are peers,
    the shard is small, and the kernel on descriptors can serve the operands."""
    rows, K = most_rows(A.shape[0], num_ranks), A.shape[1]
    return (
        num_ranks > 1
        and rows <= _MOST_FUSED_ROWS
        and rows * K * A.element_size() <= _MOST_FUSED_BYTES
        and dot_precision(A.dtype) != "ieee"
        and K * A.element_size() % 16 == 0
        and fits_descriptor(B)
    )


def fits_shape(config: triton.Config, rows: int, columns: int, num_ranks: int) -> bool:
    """Tell whether ``config`` is worth trying for all shards in the range of ``rows``, and a B
    of ``columns`` columns.

    * A cut along K saves ``_LEAST_SAVING`` of the waves.
    * Shards are visited together only where one has fewer tiles than the GPU has SMs.
    * Tiles of 64 rows do not have ``_MANY_WAVES`` waves.
    """
    tile, sms = config.kwargs, current_device().num_sms
    rows = most_rows(rows, num_ranks)
    own = triton.cdiv(rows, tile["BLOCK_SIZE_M"]) * triton.cdiv(columns, tile["BLOCK_SIZE_N"])
    full, last = divmod(own * num_ranks, sms)
    waves = full + (last > 0)
    if waves >= _MANY_WAVES and tile["BLOCK_SIZE_M"] == 64:
        return False
    if tile.get("GROUP_SIZE_SHARDS", 1) > 1 and own >= sms:
        return False
    parts = tile.get("SPLIT_K", 1)
    waves_of_parts = full + triton.cdiv(last * parts, sms) / parts
    return bool(parts == 1 or waves_of_parts <= (1 - _LEAST_SAVING) * waves)
