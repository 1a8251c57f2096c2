"""Tiles that only AllGather-GEMM tries, those of shards of few rows, and which tiles fit a shape.

With 512 gathered rows the tiles that multiply fastest, 128 x 256, are fewer than a GPU has SMs. Cut
along K they fill its waves, and the own shard, alone, keeps every SM busy until the first shard of
a peer is there (``common/split_k.py``). Smaller tiles would do so too, but read A and B more often.
"""

from __future__ import annotations

import torch
import triton

from triton_dist import tune
from triton_dist.kernels.common.gemm_launch import can_specialize_warps
from triton_dist.kernels.common.launch import dot_precision, fits_descriptor
from triton_dist.kernels.common.split_k import split_tiles
from triton_dist.runtime.device import current_device

MOST_PARTIALS = 1 << 25
"""fp32 elements of a context's workspace for split tiles, 128 MiB: four waves of the largest
tile, and the tail of a wave seven times."""
MOST_SPLIT_TILES = 1 << 12

ALL_SHARDS = 8
# A grid of so many waves is not worth small tiles.
_MANY_WAVES = 16
# What a cut should save of the waves at least; writing and reading partials costs time too.
_LEAST_SAVING = 0.03
# Larger shards, of a bucket, are not sent by SMs: copy engines leave all of those to the GEMM.
_MOST_FUSED_ROWS = 1024
_MOST_FUSED_BYTES = 16 << 20


def _split(*rows: tuple[int, ...]) -> tuple[triton.Config, ...]:
    """Configs from (BLOCK_SIZE_M, _N, _K, num_warps, num_stages, GROUP_SIZE_M, SPLIT_K,
    SPLIT_TAIL_ONLY, GROUP_SIZE_SHARDS)."""
    names = (
        "BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "SPLIT_K",
        "SPLIT_TAIL_ONLY", "GROUP_SIZE_SHARDS",
    )  # fmt: skip
    return tuple(
        triton.Config(
            dict(zip(names, (m, n, k, group, parts, bool(tail), shards), strict=True)),
            num_warps=warps,
            num_stages=stages,
        )
        for m, n, k, warps, stages, group, parts, tail, shards in rows
    )


FEW_ROWS_TILES = _split(
    (128, 256, 64, 8, 3, 8, 2, 1, 1),
    (128, 256, 64, 8, 3, 16, 2, 1, 1),
    (128, 256, 64, 8, 3, 8, 2, 0, 1),
    (128, 256, 64, 8, 3, 8, 1, 0, ALL_SHARDS),
)
WARP_SPECIALIZED_FEW_ROWS_TILES = tuple(
    triton.Config(
        config.kwargs | {"EPILOGUE_SUBTILE": config.num_stages > 3, "WARP_SPECIALIZED": True},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    for config in _split(
        (128, 256, 64, 8, 3, 8, 2, 1, 1),
        (128, 256, 64, 8, 3, 16, 2, 1, 1),
        (128, 256, 64, 8, 4, 8, 2, 1, 1),
    )
)
# As many parts as a K of two steps has, and more; one and all shards at once.
INTERPRETED_FEW_ROWS_TILES = _split(
    (32, 64, 64, 4, 2, 2, 2, 0, 1),
    (16, 32, 64, 4, 2, 4, 5, 0, ALL_SHARDS),
    (16, 32, 32, 8, 2, 4, 3, 1, 2),
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


def few_rows_tiles() -> list[triton.Config]:
    """Tiles for shards of few rows worth trying on this process's device; for the persistent
    kernel."""
    if current_device().name == "cpu":
        return list(INTERPRETED_FEW_ROWS_TILES)
    specialized = WARP_SPECIALIZED_FEW_ROWS_TILES if can_specialize_warps(torch.bfloat16) else ()
    return [*FEW_ROWS_TILES, *specialized]


def fused_tiles() -> list[tuple[triton.Config, int, int]]:
    """(tiles, ``num_comm_sms``, ``num_chunks``) worth trying where the consumer sends the shard
    itself."""
    return list(INTERPRETED_FUSED_TILES if current_device().name == "cpu" else FUSED_TILES)


def fits_fused(A: torch.Tensor, B: torch.Tensor, num_ranks: int) -> bool:
    """Whether it is worth trying that the consumer sends A [M_per_rank, K] itself: there are peers,
    the shard is small, and the kernel on descriptors can serve the operands."""
    rows, K = tune.bucket(A.shape[0]), A.shape[1]
    return (
        num_ranks > 1
        and rows <= _MOST_FUSED_ROWS
        and rows * K * A.element_size() <= _MOST_FUSED_BYTES
        and dot_precision(A.dtype) != "ieee"
        and K * A.element_size() % 16 == 0
        and fits_descriptor(B)
    )


def fits_shape(config: triton.Config, rows: int, columns: int, num_ranks: int) -> bool:
    """Whether ``config`` is worth trying for shards of up to ``tune.bucket(rows)`` rows and a B of
    ``columns`` columns.

    * What is cut along K takes fewer waves than if it were not, by ``_LEAST_SAVING``; or as many,
      if the own shard alone would leave SMs without work. For all rows of the bucket its parts have
      room in the workspace.
    * Shards are visited together only where one has fewer tiles than the GPU has SMs.
    * Tiles of 64 rows do not have ``_MANY_WAVES`` waves.
    """
    tile, sms = config.kwargs, current_device().num_sms
    rows = tune.bucket(rows)
    own = triton.cdiv(rows, tile["BLOCK_SIZE_M"]) * triton.cdiv(columns, tile["BLOCK_SIZE_N"])
    tiles, waves = own * num_ranks, triton.cdiv(own * num_ranks, sms)
    parts, shards = tile.get("SPLIT_K", 1), tile.get("GROUP_SIZE_SHARDS", 1)
    if waves >= _MANY_WAVES and tile["BLOCK_SIZE_M"] == 64:
        return False
    if shards > 1 and own >= sms:
        return False
    if parts == 1:
        return True
    tail = tile["SPLIT_TAIL_ONLY"]
    # Another number of rows of the bucket has another tail, of up to sms - 1 tiles.
    partials, counters = split_tiles(config, sms - 1 if tail else tiles, sms)
    if partials > MOST_PARTIALS or counters > MOST_SPLIT_TILES:
        return False
    whole = tiles // sms * sms if tail else 0
    waves_of_parts = whole // sms + triton.cdiv((tiles - whole) * parts, sms) / parts
    starts_sooner = not tail and own < sms
    return bool(
        waves_of_parts <= (1 - _LEAST_SAVING) * waves or (starts_sooner and waves_of_parts <= waves)
    )
