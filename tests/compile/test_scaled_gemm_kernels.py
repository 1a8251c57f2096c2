"""GEMM kernels of fp8 operands, for sm_90 without a GPU: fp8 wgmma, promotion, no spills."""

from __future__ import annotations

import re

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    TMA_LOAD,
    assert_fits,
    compile_launch,
    matrix,
    quick,
    right,
    words,
)
from triton_dist.kernels.common.exchange.protocol import Peers, Slots
from triton_dist.kernels.common.gemm.launch import sharded_gemm
from triton_dist.kernels.common.gemm.scales import Recipe, Scaling, num_scale_blocks
from triton_dist.kernels.common.gemm.spaces import (
    PERSISTENT_TILES,
    POINTER_TILES,
    SPLIT_TILES,
    WARP_SPECIALIZED_TILES,
    fits_registers,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.scatter.kernel import scattered_gemm
from triton_dist.kernels.common.scatter.one_launch import exchanged_gemm
from triton_dist.kernels.common.scatter.partials import ScatterSlot, TileMemory
from triton_dist.kernels.common.scatter.to_owners import ReduceScatterLaunches
from triton_dist.testing.compile_only import compile_only

FP8_WGMMA = re.compile(r"wgmma\.mma_async\S*\.e4m3\.e4m3")
M, N, K = 1024, 1024, 4096


def scaling(recipe, use_fast_accum=False):
    shapes = {"row": ((M,), (N,)), "tensor": ((1,), (1,))}
    a, b = (matrix(*each, dtype=torch.float32) for each in shapes.get(recipe, ((1,), (1,))))
    if recipe == "block":
        a = matrix(num_scale_blocks(K), M, dtype=torch.float32).t()
        b = matrix(num_scale_blocks(N), num_scale_blocks(K), dtype=torch.float32)
    return Scaling(a, b, use_fast_accum=use_fast_accum)


def compiled(recipe, tiles, use_fast_accum=False, persistent=True, num_ranks=1):
    A, B = matrix(M, K, dtype=torch.float8_e4m3fn), right(K, N, "column-major", torch.float8_e4m3fn)
    shards = None
    if num_ranks > 1:
        rows, flags = matrix(num_ranks * M, K, dtype=A.dtype), words()
        scales = matrix(num_ranks * M * num_scale_blocks(K), dtype=torch.float32)
        shards = GatheredShards(rows, flags, flags[:32], M, 8, scales=scales)
    scales = scaling(recipe, use_fast_accum).kernel_argument(A, B, shards and shards.scales)
    C = matrix(num_ranks * M, N)
    with compile_only(90):
        return compile_launch(
            sharded_gemm(
                A, B, C, tiles, num_sms=132, persistent=persistent, scales=scales,
                num_ranks=num_ranks, gathered=shards,
            )
        )  # fmt: skip


EVERY_TILE = [
    (recipe, fast, persistent, index)
    for recipe, fast in (("row", True), ("row", False), ("block", False), ("tensor", True))
    for persistent, tiles in ((True, PERSISTENT_TILES), (False, POINTER_TILES))
    for index, each in enumerate(tiles)
    if fits_registers(each, Recipe(recipe), fast) and each.kwargs["GROUP_SIZE_M"] == 8
]


@pytest.mark.parametrize(
    ("recipe", "fast", "persistent", "index"),
    quick(EVERY_TILE, ("row", False, True, 4), ("block", False, True, 5)),
)
def test_a_tile_multiplies_fp8_and_does_not_spill(recipe, fast, persistent, index):
    tiles = (PERSISTENT_TILES if persistent else POINTER_TILES)[index]
    kernel = compiled(recipe, tiles, fast, persistent)
    loads = 2 * kernel.num_stages if persistent else None
    assert_fits(kernel, has=[FP8_WGMMA], tma_loads=loads)
    assert promotions(kernel.ptx) is not fast


@pytest.mark.parametrize(
    ("recipe", "index"), quick([("row", 0), ("block", 0), ("block", 3)], ("block", 0))
)
def test_a_warp_specialized_tile_multiplies_fp8(recipe, index):
    tiles = WARP_SPECIALIZED_TILES[index]
    assert fits_registers(tiles, Recipe(recipe), use_fast_accum=False)
    kernel = compiled(recipe, tiles)
    assert_fits(kernel, has=[FP8_WGMMA])
    # Block scales of a gathered shard have arrived when the first stage has been loaded.
    waits_first = kernel.ptx.index("mbarrier.try_wait") < kernel.ptx.index("ld.global.cg")
    assert waits_first or recipe != "block"


def test_a_gathered_tile_reads_the_scales_of_its_shard():
    kernel = compiled("block", PERSISTENT_TILES[5], num_ranks=2)
    assert_fits(kernel, has=[FP8_WGMMA, ACQUIRE], tma_loads=4 * kernel.num_stages)
    assert promotions(kernel.ptx)


@pytest.mark.parametrize(
    ("kind", "tiles"),
    quick(
        [("gemm_rs", PERSISTENT_TILES[5]), ("gemm_ar", PERSISTENT_TILES[5])]
        + [("split", tiles) for tiles in SPLIT_TILES],
        ("gemm_rs", PERSISTENT_TILES[5]),
    ),
)
def test_a_sum_over_ranks_multiplies_fp8(kind, tiles):
    A, B = matrix(M, K, dtype=torch.float8_e4m3fn), right(K, N, "column-major", torch.float8_e4m3fn)
    scales = scaling("block").kernel_argument(A, B)
    flags, table = words(), words(2)
    options = {"num_sms": 132, "persistent": True, "scales": scales}
    if kind == "gemm_rs":
        slot = ScatterSlot(
            matrix(1), 1 << 23, table, table, flags, flags, matrix(4096, dtype=torch.int32)
        )
        launch = scattered_gemm(
            A, B, matrix(M // 2, N), None, tiles, TileMemory("tile", 1, 2, slot),
            kernel=ReduceScatterLaunches.kernel, **options,
        )  # fmt: skip
    else:
        slots = Slots(matrix(1 << 23), table, 1 << 22), Peers(flags, table, flags, words(32))
        launch = exchanged_gemm(
            A, B, matrix(M, N), None, tiles, slots, 1 << 20, rank=1, num_ranks=2,
            to_owners=kind == "split", **options,
        )  # fmt: skip
    with compile_only(90):
        assert_fits(compile_launch(launch), has=[FP8_WGMMA])


def promotions(ptx):
    """Return whether the products of a step are added to the accumulator outside of wgmma."""
    loop = ptx[ptx.rindex("wgmma.mma_async") :]
    if TMA_LOAD.search(loop):  # the loop ends after its last load
        loop = loop[: [*TMA_LOAD.finditer(loop)][-1].end()]
    return len(re.findall(r"(add|fma)(\.rn)?\.f32", loop)) >= 32
