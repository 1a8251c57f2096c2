"""The grouped GEMM of fp8 operands, for sm_90 without a GPU: fp8 wgmma, promotion, no spills."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from tests.compile.scattered import (
    ACQUIRE,
    WGMMA,
    assert_fits,
    compile_launch,
    matrix,
    quick,
    words,
)
from tests.compile.test_scaled_gemm_kernels import FP8_WGMMA
from triton_dist.kernels.common.gemm.quantise import quantise_launch
from triton_dist.kernels.common.gemm.scales import ScaledKey, Scaling, num_scale_blocks
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.scales import OperandScales, packed_format, unpacked
from triton_dist.kernels.common.moe.spaces import (
    GROUPED_TILES,
    WARP_SPECIALIZED_GROUPED_TILES,
    fits_grouped,
    fits_scaled_registers,
    grouped_tiles,
)
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS
from triton_dist.kernels.nvidia.allgather_group_gemm.algorithms import with_exported_kernel
from triton_dist.kernels.nvidia.grouped_gemm.algorithms import GroupedKey
from triton_dist.runtime.device import current_device
from triton_dist.testing.compile_only import compile_only

TOKENS, TOPK, E, K, N, RANKS = 4096, 8, 128, 2048, 1536, 4
FP8, FP32 = torch.float8_e4m3fn, torch.float32
ARRIVAL_OF_COPIES = "cp.async.mbarrier.arrive.noinc"
LOWEST = 64
"""Tiles with fewer rows and fewer columns multiply in fp16, to which e4m3 converts exactly."""


def launched(recipe, config, fast=False, silu_mul=False, is_gathered=False, K=K):
    B = matrix(E, N, K, dtype=FP8).mT
    scaling = Scaling(matrix(TOKENS, dtype=FP32), matrix(E, N, dtype=FP32), use_fast_accum=fast)
    if recipe == "block":
        a_scale = matrix(num_scale_blocks(K), TOKENS, dtype=FP32).t()
        scaling = Scaling(a_scale, matrix(E, num_scale_blocks(N), num_scale_blocks(K), dtype=FP32))
    C = matrix(TOKENS * TOPK, N // 2 if silu_mul else N)
    A, options, sources = matrix(TOKENS, K, dtype=FP8), {}, {}
    scales = OperandScales.of(A, B, scaling)
    if is_gathered:
        width, dtype = packed_format(K, FP8)
        rows, own = matrix(TOKENS, width, dtype=dtype), matrix(TOKENS // RANKS, width, dtype=dtype)
        A, scales = unpacked(own, FP8, K), scales.of_packed_rows(rows, own)
        gathered = GatheredShards(unpacked(rows, FP8, K), words(), words(32), 1, MAX_CHUNKS)
        options = {"gathered": gathered, "rank": 1}
        sources = {"rank": 1, "num_sources": RANKS, "group_ends": (1, RANKS)}
    ids = matrix(TOKENS, TOPK, dtype=torch.int32)
    routes = block_map(ids, E, config.kwargs["BLOCK_SIZE_M"], **sources)
    return grouped_product(A, B, C, routes, config, silu_mul=silu_mul, scales=scales, **options)


def compiled(recipe, config, *options):
    with compile_only(90):
        return compile_launch(launched(recipe, config, *options))


def is_candidate(index, recipe, fast):
    with mock.patch.object(type(current_device()), "interprets", False):
        return fits_scaled_registers(GROUPED_TILES[index], recipe, fast)


EVERY_TILE = [
    (recipe, fast, index, silu_mul, is_gathered)
    for recipe, fast in (("row", True), ("row", False), ("block", False))
    for index in range(len(GROUPED_TILES))
    for silu_mul, is_gathered in ((False, False), (True, False), (False, True))
]


@pytest.mark.parametrize(
    ("recipe", "fast", "index", "silu_mul", "is_gathered"),
    quick(
        EVERY_TILE,
        ("block", False, 10, True, False),
        ("block", False, 10, False, True),
        ("row", True, 20, False, False),
    ),
)
def test_a_tile_multiplies_fp8_and_does_not_spill(recipe, fast, index, silu_mul, is_gathered):
    if not is_candidate(index, recipe, fast):
        pytest.skip("the tile is not tried")
    kernel = compiled(recipe, GROUPED_TILES[index], fast, silu_mul, is_gathered)
    tile = GROUPED_TILES[index].kwargs
    is_low = max(tile["BLOCK_SIZE_M"], tile["BLOCK_SIZE_N"] // (1 + silu_mul)) < LOWEST
    assert_fits(
        kernel,
        tma_loads=kernel.num_stages * (1 + silu_mul),
        has=["mma.sync" if is_low else FP8_WGMMA, "cp.async.cg"],
    )
    if not is_low and not silu_mul:  # partial sums of wgmma are added, unless fast
        assert bool(re.search(r"(add|fma)(\.rn)?\.f32", kernel.ptx)) is not fast


@pytest.mark.parametrize(
    ("index", "silu_mul", "is_gathered"),
    quick(
        [(index, *options) for index in (0, -1) for options in ((0, 0), (1, 0), (0, 1))],
        (-1, 0, 1),
    ),
)
def test_warp_specialized_tiles_gather_rows(index, silu_mul, is_gathered):
    tiles = WARP_SPECIALIZED_GROUPED_TILES[index]
    kernel = compiled("block", tiles, False, silu_mul, is_gathered)
    assert kernel.name == "kernel_grouped_gemm_warp_specialized"
    assert kernel.num_warps == 12
    assert_fits(kernel, tma_loads=2, has=[FP8_WGMMA, ARRIVAL_OF_COPIES])
    copies = [match.start() for match in re.finditer(r"cp\.async\.cg\.shared", kernel.ptx)]
    assert len(copies) == tiles.kwargs["BLOCK_SIZE_M"] // 16  # 16 bytes per thread
    # A gathered row's scales have arrived once its stage is full; only the producer polls flags.
    if is_gathered:
        acquires = [match.start() for match in re.finditer(re.escape(ACQUIRE), kernel.ptx)]
        assert acquires[-1] < copies[0]
        assert WGMMA not in kernel.ptx[acquires[0] : copies[-1]]
        assert kernel.ptx.index("mbarrier.try_wait") < kernel.ptx.index("ld.global.cg")


@pytest.mark.parametrize(
    ("recipe", "K", "arch", "name"),
    [
        ("block", 1024, 90, "kernel_grouped_gemm_warp_specialized"),
        ("block", 1040, 90, "kernel_grouped_gemm"),
        ("block", 1024, 100, "kernel_grouped_gemm"),
        ("row", 1024, 90, "kernel_grouped_gemm"),
    ],
)
def test_warp_specialization_requires_block_scales_whole_blocks_and_hopper(recipe, K, arch, name):
    tiles = WARP_SPECIALIZED_GROUPED_TILES[0]
    key = GroupedKey(TOKENS, N, K, E, TOPK, FP8, "column-major", "token", "route", None)
    key = ScaledKey(key, recipe, (False, False), torch.bfloat16, False, False)
    with compile_only(arch):
        launch = launched(recipe, tiles, K=K)
        assert launch.kernel.fn.__name__ == name
        assert "WARP_SPECIALIZED" not in launch.options
        assert with_exported_kernel(launch) is launch  # no script replaced the kernel
        with mock.patch.object(type(current_device()), "interprets", False):
            is_tried = tiles in grouped_tiles() and fits_grouped(
                {"gemm_config": tiles}, FP8, E, N, TOKENS, TOPK, key
            )
    assert is_tried is (name != "kernel_grouped_gemm")


QUANTISED = [(29568, "row"), (7168, "block"), (7168, "static")]


@pytest.mark.parametrize(("K", "kind"), quick(QUANTISED, *QUANTISED[:2]))
def test_rows_are_quantised_by_hardware_conversion(sm90, K, kind):
    x, out = matrix(TOKENS, 2 * K), matrix(TOKENS, K, dtype=FP8)
    scale = matrix(TOKENS, dtype=FP32)
    if kind == "block":
        scale = matrix(num_scale_blocks(K), TOKENS, dtype=FP32).t()
    static_scale = matrix(3, dtype=FP32) if kind == "static" else None
    kernel = compile_launch(quantise_launch(x, out, scale, True, static_scale))
    assert_fits(kernel, has=["cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4.b32"])
