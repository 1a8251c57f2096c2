"""Tile configs to try for grouped GEMMs, and checks of a config for a number of tokens.

Each tile reads weights of its expert for BLOCK_SIZE_M rows. If experts have few rows, the time to
read the weights limits the GEMM. Tiles with few rows and several programs per SM are then faster,
because one program reads while another begins or ends a tile. ``GROUPED_TILES`` has the fastest
configs measured on H200, and similar configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from triton_dist.kernels.common.gemm.scales import BLOCK_ELEMENTS, FP8, Recipe
from triton_dist.kernels.common.gemm.spaces import (
    can_specialize_warps,
    config_for_dtype,
    fits_registers,
    max_rows_of_key,
    prune_fn_by_shared_memory,
    tile_configs,
)
from triton_dist.kernels.common.moe.skew import skewed_ids
from triton_dist.runtime.device import current_device

_MAX_BLOCK_M, _MAX_BLOCK_M_FEW_ROWS, _MIN_COLUMNS = 128, 32, 64
_MAX_TILES_PER_EXPERT = 16
_NUM_OTHER_BATCHES = 3
# Limits of ``other_batches``. With fewer rows per expert, a draw may not use all experts. With more
# routes (pairs of token and expert) there are dozens of waves, so one more tile does not matter.
_MIN_ROWS_PER_EXPERT, _MAX_ROUTES = 16, 1 << 16


_OPTIONAL_CONSTANTS = ("GROUP_SIZE_M", "PROGRAMS")
GROUPED_TILES = tile_configs(
    (128, 256, 64, 8, 3, 8, 1),
    (128, 256, 64, 8, 4, 8, 1),
    (128, 256, 64, 8, 3, 16, 1),
    (128, 128, 64, 8, 4, 8, 1),
    (128, 128, 64, 4, 3, 8, 2),
    (128, 128, 64, 8, 3, 8, 2),
    (128, 64, 64, 4, 4, 8, 2),
    (64, 256, 64, 4, 4, 8, 1),
    (64, 128, 64, 4, 4, 8, 2),
    (64, 128, 128, 4, 4, 8, 1),
    (64, 64, 128, 4, 3, 8, 2),
    (32, 256, 64, 4, 4, 8, 1),
    (32, 128, 128, 4, 4, 8, 1),
    (32, 128, 64, 4, 4, 8, 2),
    (32, 64, 128, 4, 4, 8, 2),
    (16, 256, 64, 4, 4, 8, 1),
    (16, 128, 128, 4, 5, 8, 1),
    (16, 128, 64, 4, 5, 8, 2),
    (16, 64, 128, 4, 5, 8, 2),
    (16, 64, 256, 4, 4, 8, 1),
    (16, 32, 256, 4, 4, 8, 2),
    names=_OPTIONAL_CONSTANTS,
)
# Only for fp8 operands with BLOCK scales.
WARP_SPECIALIZED_GROUPED_TILES = tile_configs(
    (128, 256, 64, 8, 4, 8, 1),
    (128, 256, 64, 8, 4, 1, 1),
    (128, 128, 64, 8, 6, 8, 1),
    names=_OPTIONAL_CONSTANTS,
    WARP_SPECIALIZED=True,
)
# Small tiles: small GEMMs in the interpreter then have several tiles per expert, some partial.
INTERPRETED_GROUPED_TILES = tile_configs(
    (16, 32, 32, 4, 2, 2, 1),
    (32, 64, 64, 4, 2, 1, 2),
    (64, 32, 64, 4, 2, 4, 1),
    names=_OPTIONAL_CONSTANTS,
)


def grouped_tiles() -> list[triton.Config]:
    """Return the configs to try on this device; the first is the default."""
    if current_device().interprets:
        return list(INTERPRETED_GROUPED_TILES)
    specialized = can_specialize_warps(FP8[0])
    return [*GROUPED_TILES, *(WARP_SPECIALIZED_GROUPED_TILES if specialized else ())]


def fits_grouped(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    E: int,
    columns: int,
    tokens: int,
    topk: int,
    key: Any = None,
) -> bool:
    """Return whether a config is worth trying for all calls whose key covers ``tokens`` tokens.

    * Tiles fit in shared memory and, for fp8 operands (``key`` is a ``ScaledKey``), in registers.
    * Tiles have at most max(32, 4 times the mean number of rows per expert) rows.
    * Each tile reads weights again. On average, an expert therefore has at most
      ``_MAX_TILES_PER_EXPERT`` tiles along its rows, except for tiles of 128 rows.
    * Tiles are less than twice as wide as the output.
    """
    gemm_config: triton.Config = config["gemm_config"]
    if current_device().interprets:
        return True
    m, n = gemm_config.kwargs["BLOCK_SIZE_M"], gemm_config.kwargs["BLOCK_SIZE_N"]
    rows = max_rows_of_key(tokens) * topk / E
    has_enough_rows = rows <= _MAX_TILES_PER_EXPERT * m or m == _MAX_BLOCK_M
    launched_config = {"gemm_config": config_for_dtype(gemm_config, dtype)}
    if gemm_config.kwargs.get("WARP_SPECIALIZED"):
        is_block = dtype in FP8 and key.recipe == Recipe.BLOCK.value
        if not is_block or key.K % BLOCK_ELEMENTS or key.layout != "column-major":
            return False
        if getattr(key, "activation", None) and columns % n:
            return False
    elif dtype in FP8 and not fits_scaled_registers(gemm_config, key.recipe, key.use_fast_accum):
        return False
    return (
        m <= max(_MAX_BLOCK_M_FEW_ROWS, 4 * rows)
        and has_enough_rows
        and n < 2 * max(columns, _MIN_COLUMNS)
        and prune_fn_by_shared_memory(launched_config, torch.empty(0, dtype=dtype, device="meta"))
    )


def fits_scaled_registers(gemm_config: triton.Config, recipe: str, use_fast_accum: bool) -> bool:
    """Return whether the accumulators of a tile of fp8 operands fit in registers."""
    m, n = gemm_config.kwargs["BLOCK_SIZE_M"], gemm_config.kwargs["BLOCK_SIZE_N"]
    # 16 bytes, on Triton 3.6.
    spills = m == _MAX_BLOCK_M_FEW_ROWS and n == 256 and recipe == Recipe.BLOCK.value
    return not spills and fits_registers(gemm_config, Recipe(recipe), use_fast_accum)


def other_batches(
    topk_ids: torch.Tensor, E: int, routing_skew: str | None = None
) -> list[torch.Tensor]:
    """Return expert ids [M, topk] of other batches, for a tuning that measures several routings.

    A batch is drawn from the tokens of ``topk_ids`` with replacement; all ranks draw equal batches.
    With ``routing_skew``, return one batch with this skew instead.

    The number of tiles varies between batches, and for some configs one more tile causes a nearly
    empty wave. The fastest config of one batch was 7 % slower than another config on the next
    batch (4096 tokens, Mixtral 8x7B, two H100). Return an empty list for very few or very many
    routes, and in the interpreter, where times are meaningless.
    """
    if routing_skew is not None:
        return [skewed_ids(topk_ids, E, routing_skew)]
    tokens, routes = len(topk_ids), topk_ids.numel()
    has_few, has_many = routes < _MIN_ROWS_PER_EXPERT * E, routes > _MAX_ROUTES
    if has_few or has_many or current_device().interprets:
        return []
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randint(tokens, (_NUM_OTHER_BATCHES, tokens), generator=generator, device="cpu")
    return [topk_ids[each] for each in rows.to(topk_ids.device)]
