"""Ops and layers with fp8 operands on GPUs: what CPU ranks check, compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed import scaled_gemm_ranks, scaled_moe_ranks
from tests.distributed.scaled_moe_ranks import GATHERS, SUMS
from tests.fp8 import error_of_sum, largest_error, quantised, quantised_experts
from tests.gpu.ranks import few_ranks
from tests.layers import fp8_ranks, test_symm_mem
from triton_dist.kernels.common.gemm.scales import FP8, Scaling
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.moe.routing import TILE_RECORD_WORDS, max_tiles
from triton_dist.kernels.common.moe.spaces import WARP_SPECIALIZED_GROUPED_TILES
from triton_dist.kernels.nvidia import grouped_gemm, matmul
from triton_dist.kernels.nvidia.gemm.op import fits_matmul, matmul_configs
from triton_dist.layers.nvidia import TP_MLP, EP_MoE, TP_Attn, TP_MoE
from triton_dist.layers.nvidia.fp8 import quantise

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="fp8 needs compute capability 8.9",
    ),
]
RECIPES = ("tensor", "row", "block")
E4M3, E5M2 = FP8
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def matmul_operands(
    recipe: str, M: int, N: int, K: int
) -> tuple[torch.Tensor, torch.Tensor, Scaling]:
    generator = torch.Generator("cuda").manual_seed(M + N + K)
    A, B = (torch.randn(n, K, device="cuda", generator=generator) for n in (M, N))
    A *= torch.rand(M, 1, device="cuda", generator=generator) * 30
    return quantised(A, B, recipe)


@each_recipe
@pytest.mark.parametrize("fast", [False, True])
def test_matmul_with_every_config(recipe, fast):
    A, B, scaling = matmul_operands(recipe, 300, 768, 1024)
    for config in fitting(A, B, scaling._replace(use_fast_accum=fast)):
        check(A, B, scaling._replace(use_fast_accum=fast), config)


@each_recipe
@pytest.mark.parametrize("size", [(1, 256, 4096), (130, 131, 137)])
def test_matmul_of_odd_sizes(recipe, size):
    A, B, scaling = matmul_operands(recipe, *size)
    for config in fitting(A, B, scaling)[::6]:
        check(A, B, scaling, config)


def fitting(A: torch.Tensor, B: torch.Tensor, scaling: Scaling) -> list[dict[str, Any]]:
    return [each for each in matmul_configs() if fits_matmul(each, A, B, **scaling._asdict())]


def check(A: torch.Tensor, B: torch.Tensor, scaling: Scaling, config: dict[str, Any]) -> None:
    C = matmul.fn(A, B, **config, **scaling._asdict())
    assert largest_error(C, A, B, scaling) <= 1, config


@few_ranks
@each_recipe
def test_ag_gemm_of_every_recipe(on_gpus, recipe):
    for size in (
        (9, 40, 272, E4M3, torch.bfloat16),
        (256, 512, 1024, E4M3, torch.bfloat16),
        (5, 33, 145, E5M2, torch.float32),
        (1, 512, 512, E4M3, torch.bfloat16),
    ):
        for errors in on_gpus(scaled_gemm_ranks.ag_gemm_of, recipe, *size):
            assert max(errors) <= 1, size


@few_ranks
def test_specialized_warps_wait_for_block_scales(on_gpus):
    """A program must not read the first scales of a gathered tile before they have arrived."""
    for right in on_gpus(scaled_gemm_ranks.late_block_scales):
        assert all(right), right


@few_ranks
def test_kernels_detect_scales_of_another_layout(on_gpus):
    for seen in on_gpus(scaled_gemm_ranks.scales_of_another_layout):
        assert all(len(set(by_rank.values())) == 2 for by_rank in seen)


@few_ranks
@each_recipe
@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_sums_of_every_recipe(on_gpus, name, recipe):
    odd = 256 if recipe == "block" else 145  # blocks must be whole
    for size in (
        (19, 40, 256, torch.bfloat16),
        (256, 512, 1024, torch.bfloat16),
        (7, 33, odd, torch.float32),
    ):
        for errors in on_gpus(scaled_gemm_ranks.sum_of, name, recipe, *size):
            assert len(errors) >= 4, size
            assert max(errors) <= 1, size


@few_ranks
def test_functions_return_what_torch_returns(on_gpus, alternate):
    if alternate:
        pytest.skip("torch's operators need a GPU for each rank")
    on_gpus(test_symm_mem.gathers)
    on_gpus(test_symm_mem.scatters)


@pytest.mark.parametrize(
    ("M", "topk", "E", "K", "N", "per_route", "dtype"),
    [
        (1, 1, 1, 256, 7, True, E4M3),
        (17, 3, 4, 384, 131, False, E5M2),
        (4, 2, 12, 256, 144, False, E4M3),
        (601, 2, 3, 1024, 768, True, E4M3),
        (2000, 3, 5, 640, 1000, False, E4M3),
    ],
)
@pytest.mark.parametrize("index", [0, -1])
def test_warp_specialized_grouped_products(index, M, topk, E, K, N, per_route, dtype):
    """Expert 0 has no token; some tokens are dropped."""
    A, B = (scaled_moe_ranks.random(n, n, K) for n in (M * topk if per_route else M, E * N))
    B = B.view(E, N, K) * torch.arange(1, E + 1, device="cuda")[:, None, None]
    a, b, scales = quantised_experts(A, B, "block", dtype)
    ids = scaled_moe_ranks.ids_of(M, topk, E)
    expected, magnitudes = scaled_moe_ranks.products(
        *Scaling(**scales).dequantised(a, b, torch.float64), ids
    )
    bound = error_of_sum(K, on_gpu=True) * magnitudes + 2.0**-30 + 2.0**-8 * expected.abs()
    tiles = WARP_SPECIALIZED_GROUPED_TILES[index]
    call = functools.partial(grouped_gemm.fn, a, b, ids, gemm_config=tiles, **scales)
    C = call()
    assert ((C.double() - expected).abs() / bound).nan_to_num(nan=9.0).max() <= 1
    order = torch.where((ids < 0) | (ids >= E), E, ids).flatten().argsort(stable=True)
    assert torch.equal(call(order="sorted"), C[order])
    if N % 256 == 0:
        gate, up = C.float().chunk(2, 1)
        gated = call(activation="silu_mul", out_dtype=torch.float32)
        error = (gated - torch.nn.functional.silu(gate) * up).abs()
        assert (error <= 2.0**-6 * (gate * up).abs() + 1e-6).all()


@pytest.mark.parametrize("kind", ["gathered", "position"])
def test_warp_specialized_grouped_products_without_routes(kind):
    """The records of tiles are uninitialised; they may not reach an address."""
    E, K, N, number = 3, 256, 256, 512
    A, B = scaled_moe_ranks.random(number, number, K), scaled_moe_ranks.random(E * N, E * N, K)
    a, b, scales = quantised_experts(A, B.view(E, N, K), "block", E4M3)
    ends, rows = torch.zeros((number + E,), dtype=torch.int32, device="cuda").split((E, number))
    positions = Positions(ends, number, rows if kind == "gathered" else None, number, 1)
    tiles = WARP_SPECIALIZED_GROUPED_TILES[0]
    # The records take this memory again.
    torch.full(
        (max_tiles(number, E, 128), TILE_RECORD_WORDS.value),
        2**30,
        dtype=torch.int32,
        device="cuda",
    )
    grouped_gemm.fn(a, b, positions, gemm_config=tiles, **scales)
    torch.cuda.synchronize()


@few_ranks
@pytest.mark.parametrize(
    ("recipe", "m", "N", "K"), [("row", 2, 16, 144), ("block", 40, 256, 384), ("tensor", 3, 48, 64)]
)
def test_scales_travel_with_the_rows(on_gpus, recipe, m, N, K):
    for count in on_gpus(scaled_moe_ranks.gathered, recipe, m, N, K, E4M3):
        assert count >= len(GATHERS)


@few_ranks
@pytest.mark.parametrize(
    ("recipe", "all_rows", "m", "N", "k"),
    [("block", False, 30, 512, 256), ("row", True, 2, 48, 32), ("tensor", True, 1, 16, 16)],
)
def test_sums_of_scaled_products(on_gpus, recipe, all_rows, m, N, k):
    for count in on_gpus(scaled_moe_ranks.summed, recipe, all_rows, m, N, k, torch.bfloat16):
        assert count >= min(2, len(SUMS))


@few_ranks
@pytest.mark.parametrize(
    ("kind", "recipe", "columns"),
    [
        (TP_MLP, "static", 32),
        (TP_MLP, "block", 300),
        (TP_Attn, "row", 0),
        (TP_Attn, "block", 0),
        (TP_MoE, "static", 32),
        (TP_MoE, "block", 300),
        (EP_MoE, "static", 32),
        (EP_MoE, "row", 32),
        (EP_MoE, "block", 300),
    ],
)
def test_served_layers(on_gpus, kind, recipe, columns):
    on_gpus(fp8_ranks.served, kind, recipe, columns)


@few_ranks
@pytest.mark.parametrize("recipe", ["row", "block"])
def test_a_model_folder_of_fp8_weights(on_gpus, tmp_path, recipe):
    pytest.importorskip("safetensors", reason="needs safetensors, of the extra models")
    for errors in on_gpus(fp8_ranks.loaded, tmp_path, recipe):
        assert max(errors) < 0.1, errors


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("static", [None, torch.tensor([0.25, 0.5])])
@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("rows", [1, 300])
def test_quantised_rows(rows, is_block, static, silu_mul):
    """Equal to torch's quotients, except for elements between two numbers of fp8."""
    if is_block and static is not None:
        pytest.skip("a static scale is for all elements")
    x = torch.randn(rows, 1000 * (1 + silu_mul), device="cuda").bfloat16() * 100
    x[0, :4] = torch.tensor([6e4, -6e4, 0.0, 1e-30])
    out, scale = quantise(x, is_block, silu_mul, None if static is None else static.cuda())
    wanted = x.float()
    if silu_mul:
        gate, up = wanted.chunk(2, 1)
        wanted = torch.nn.functional.silu(gate) * up
    factor = scale.repeat_interleave(128, 1)[:, :1000] if is_block else scale[:, None]
    wanted = (wanted / factor).clamp(-448, 448)
    error = (out.float() - wanted).abs()
    assert (error <= wanted.abs() * 2.0**-4 * 1.01 + 2.0**-10 * 1.01).all()
    assert static is None or scale.tolist() == [0.5]
