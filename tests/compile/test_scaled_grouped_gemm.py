"""The grouped GEMM of fp8 operands, for sm_90 without a GPU: fp8 wgmma, promotion, no spills."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch

from tests.compile.scattered import assert_fits, compile_launch, matrix, quick, words
from tests.compile.test_scaled_gemm_kernels import FP8_WGMMA
from triton_dist.kernels.common.gemm.quantise import quantisation
from triton_dist.kernels.common.gemm.scales import Scaling, blocks
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.routing import block_map
from triton_dist.kernels.common.moe.scales import OperandScales, packed_form, unpacked
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES, fits_scaled
from triton_dist.kernels.common.peers import GatheredShards
from triton_dist.kernels.common.slots.gathered import MAX_CHUNKS
from triton_dist.runtime.device import current_device
from triton_dist.testing.compile_only import compile_only

TOKENS, TOPK, E, K, N, RANKS = 4096, 8, 128, 2048, 1536, 4
FP8, FP32 = torch.float8_e4m3fn, torch.float32
LOWEST = 64
"""Lower tiles multiply in fp16, which e4m3 converts to exactly."""


def compiled(recipe, index, fast=False, silu_mul=False, is_gathered=False):
    config = GROUPED_TILES[index]
    B = matrix(E, N, K, dtype=FP8).mT
    scaling = Scaling(matrix(TOKENS, dtype=FP32), matrix(E, N, dtype=FP32), use_fast_accum=fast)
    if recipe == "block":
        a_scale = matrix(blocks(K), TOKENS, dtype=FP32).t()
        scaling = Scaling(a_scale, matrix(E, blocks(N), blocks(K), dtype=FP32))
    C = matrix(TOKENS * TOPK, N // 2 if silu_mul else N)
    A, options, sources = matrix(TOKENS, K, dtype=FP8), {}, {}
    scales = OperandScales.of(A, B, scaling)
    if is_gathered:
        width, dtype = packed_form(K, FP8)
        rows, own = matrix(TOKENS, width, dtype=dtype), matrix(TOKENS // RANKS, width, dtype=dtype)
        A, scales = unpacked(own, FP8, K), scales.of_rows(rows, own)
        gathered = GatheredShards(unpacked(rows, FP8, K), words(), words(32), 1, MAX_CHUNKS)
        options = {"gathered": gathered, "rank": 1}
        sources = {"rank": 1, "num_sources": RANKS, "group_ends": (1, RANKS)}
    with compile_only(90):
        ids = matrix(TOKENS, TOPK, dtype=torch.int32)
        routes = block_map(ids, E, config.kwargs["BLOCK_SIZE_M"], **sources)
        launch = grouped_product(
            A, B, C, routes, config, silu_mul=silu_mul, scales=scales, **options
        )
        return compile_launch(launch)


def is_candidate(index, recipe, fast):
    with mock.patch.object(type(current_device()), "interprets", False):
        return fits_scaled(GROUPED_TILES[index], recipe, fast)


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
        ("row", False, 8, False, False),
        ("block", False, 10, True, False),
        ("block", False, 10, False, True),
        ("row", True, 20, False, False),
    ),
)
def test_a_tile_multiplies_fp8_and_does_not_spill(recipe, fast, index, silu_mul, is_gathered):
    if not is_candidate(index, recipe, fast):
        pytest.skip("the tile is not tried")
    kernel = compiled(recipe, index, fast, silu_mul, is_gathered)
    is_low = GROUPED_TILES[index].kwargs["BLOCK_SIZE_M"] < LOWEST
    assert_fits(
        kernel,
        tma_loads=kernel.num_stages * (1 + silu_mul),
        has=["mma.sync" if is_low else FP8_WGMMA, "cp.async.cg"],
    )
    if not is_low and not silu_mul:  # partial sums of wgmma are added, unless fast
        assert bool(re.search(r"(add|fma)(\.rn)?\.f32", kernel.ptx)) is not fast


@pytest.mark.parametrize(("K", "kind"), [(29568, "row"), (7168, "block"), (7168, "static")])
def test_rows_are_quantised_by_hardware_conversion(sm90, K, kind):
    x, out = matrix(TOKENS, 2 * K), matrix(TOKENS, K, dtype=FP8)
    scale = matrix(TOKENS, dtype=FP32)
    if kind == "block":
        scale = matrix(blocks(K), TOKENS, dtype=FP32).t()
    static_scale = matrix(3, dtype=FP32) if kind == "static" else None
    kernel = compile_launch(quantisation(x, out, scale, True, static_scale))
    assert_fits(kernel, has=["cvt.rn.satfinite.e4m3x2.f32", "ld.global.v4.b32"])
