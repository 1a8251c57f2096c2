"""Split-K: a tile of C as the sum of parts along K, computed by different programs.

Cut are the tiles of the last wave, if it is not full; so all of them, if there are fewer than
programs. Each part is written as an fp32 *partial* to a workspace, then counted. Who counts the
last part of a tile adds all of them, in the order of K or two in either order, so the result does
not depend on who was last; it also sets the counter back to 0 for the next launch. Nobody waits, so
no program depends on another one being resident.

A partial lies in the workspace in the order in which the registers of a Hopper accumulator hold it
(wgmma: 16 rows a warp; a thread has 2 neighbouring columns of every 8, in 2 rows). So 16 bytes a
thread are stored and read back in full lines, and nothing goes through shared memory, which the
stages of A and B fill. Elsewhere the order is as good as any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from triton_dist._jit import jit


@dataclass(frozen=True)
class SplitWorkspace:
    """Memory in which parts of tiles are added up; launches that use one follow one another on the
    device.

    ``partials`` fp32, any content; ``counters`` int32, one a split tile, all 0 between launches.
    """

    partials: torch.Tensor
    counters: torch.Tensor


def split_tiles(config: triton.Config, tiles: int, num_sms: int) -> tuple[int, int]:
    """(fp32 elements, counters) of workspace that ``config`` takes for a GEMM of ``tiles`` tiles on
    ``num_sms`` programs."""
    tile = config.kwargs
    parts = tile.get("SPLIT_K", 1)
    if parts == 1:
        return 0, 0
    split = tiles % num_sms
    return split * parts * tile["BLOCK_SIZE_M"] * tile["BLOCK_SIZE_N"], split


@jit
def units_of_tiles(tiles, whole, SPLIT_K: tl.constexpr):
    """Units of work of the first ``tiles`` tiles, of which those from ``whole`` on are split."""
    if SPLIT_K == 1:
        return tiles
    else:
        return min(tiles, whole) + max(tiles - whole, 0) * SPLIT_K


@jit
def part_of_unit(unit, whole, SPLIT_K: tl.constexpr):
    """(tile, part, number of parts of that tile) of the ``unit``-th unit of work."""
    if SPLIT_K == 1:
        return unit, 0, 1
    else:
        beyond = max(unit - whole, 0)
        num_parts = tl.where(unit < whole, 1, SPLIT_K)
        return min(unit, whole) + beyond // SPLIT_K, beyond % SPLIT_K, num_parts


@jit
def _in_register_order(tile, NUM_WARPS: tl.constexpr):
    """[BLOCK_SIZE_M, BLOCK_SIZE_N] as one dimension, in the order of the workspace."""
    block_m: tl.constexpr = tile.shape[0]
    block_n: tl.constexpr = tile.shape[1]
    warps: tl.constexpr = min(NUM_WARPS, block_m // 16)
    parts = tl.reshape(tile, (block_m // 16 // warps, warps, 2, 8, block_n // 16, 2, 4, 2))
    return tl.reshape(tl.permute(parts, (4, 0, 2, 1, 3, 6, 5, 7)), (block_m * block_n,))


@jit
def _in_rows(
    partial, NUM_WARPS: tl.constexpr, BLOCK_SIZE_M: tl.constexpr, BLOCK_SIZE_N: tl.constexpr
):
    """The inverse of ``_in_register_order``."""
    warps: tl.constexpr = min(NUM_WARPS, BLOCK_SIZE_M // 16)
    parts = tl.reshape(
        partial, (BLOCK_SIZE_N // 16, BLOCK_SIZE_M // 16 // warps, 2, warps, 8, 4, 2, 2)
    )
    return tl.reshape(tl.permute(parts, (1, 3, 2, 4, 0, 6, 5, 7)), (BLOCK_SIZE_M, BLOCK_SIZE_N))


@jit
def publish_partial(
    accumulator,
    partials_ptr,
    counters_ptr,
    tile,
    part,
    SPLIT_K: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Store a part of the ``tile``-th split tile and count it; whether it was the last one."""
    size: tl.constexpr = accumulator.shape[0] * accumulator.shape[1]
    start = (tile * SPLIT_K + part).to(tl.int64) * size
    # Ordinary stores, no TMA: a release orders only these.
    tl.store(partials_ptr + start + tl.arange(0, size), _in_register_order(accumulator, NUM_WARPS))
    tl.debug_barrier()  # the release is one thread's; all threads' stores come before it
    before = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu")
    is_last = before == SPLIT_K - 1
    if is_last:
        tl.store(counters_ptr + tile, 0)
    return is_last


@jit
def sum_of_partials(
    accumulator, partials_ptr, tile, part, SPLIT_K: tl.constexpr, NUM_WARPS: tl.constexpr
):
    """fp32 [BLOCK_SIZE_M, BLOCK_SIZE_N], the sum of all parts of the ``tile``-th split tile;
    ``accumulator`` is its ``part``-th."""
    block_m: tl.constexpr = accumulator.shape[0]
    block_n: tl.constexpr = accumulator.shape[1]
    size: tl.constexpr = block_m * block_n
    part_ptr = partials_ptr + tile.to(tl.int64) * (SPLIT_K * size) + tl.arange(0, size)
    # Not from L1, where old ones may be.
    if SPLIT_K == 2:  # the other's is enough: a + b = b + a
        other = tl.load(part_ptr + (1 - part) * size, cache_modifier=".cg")
        return accumulator + _in_rows(other, NUM_WARPS, block_m, block_n)
    else:
        total = tl.load(part_ptr, cache_modifier=".cg")
        for _ in range(1, SPLIT_K):
            part_ptr += size
            total += tl.load(part_ptr, cache_modifier=".cg")
        return _in_rows(total, NUM_WARPS, block_m, block_n)
