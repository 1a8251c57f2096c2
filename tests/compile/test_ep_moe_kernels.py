"""The kernels of expert-parallel layers, for sm_90 without a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.compile.scattered import WGMMA, assert_fits, compile_launch, matrix, quick
from tests.compile.test_grouped_gemm import COLUMN_MAJOR, ROW_MAJOR, E, K, N, weights
from triton_dist.kernels.common.moe import activation
from triton_dist.kernels.common.moe.positions import Positions
from triton_dist.kernels.common.moe.product import grouped_product
from triton_dist.kernels.common.moe.sorted_rows import gather_positions, tiles_of_positions
from triton_dist.kernels.common.moe.spaces import GROUPED_TILES

TOKENS, TOPK, RANKS = 4096, 8, 2
NUMBER = TOKENS * TOPK * RANKS


def positions(is_sorted=False):
    rows = None if is_sorted else matrix(NUMBER, dtype=torch.int32)
    return Positions(matrix(E, dtype=torch.int32), NUMBER, rows, TOKENS, TOPK)


EVERY = [(index, is_sorted) for index in range(len(GROUPED_TILES)) for is_sorted in (False, True)]


@pytest.mark.parametrize(("index", "is_sorted"), quick(EVERY, (0, True)))
def test_products_of_positions(sm90, index, is_sorted):
    config = GROUPED_TILES[index]
    blocks = tiles_of_positions(positions(is_sorted), config.kwargs["BLOCK_SIZE_M"])
    rows = NUMBER if is_sorted else TOKENS * RANKS
    launch = grouped_product(
        matrix(rows, K), weights(COLUMN_MAJOR if is_sorted else ROW_MAJOR), matrix(NUMBER, N),
        blocks, config, is_sorted=True, routes_per_row=0 if is_sorted else 1,
    )  # fmt: skip
    is_low = config.kwargs["BLOCK_SIZE_M"] < 64
    assert_fits(compile_launch(launch), has=[] if is_low else [WGMMA])
    if index == 0:
        assert_fits(compile_launch(blocks.launches[0]))


def test_copies_and_activations(sm90):
    vectors = ["ld.global.v4.b32", "st.global.v4.b32"]
    assert_fits(compile_launch(gather_positions(positions(), matrix(64, K))[1]), has=vectors)
    products, grads = matrix(NUMBER, 2 * 768), matrix(NUMBER, 768)
    weight = matrix(NUMBER, dtype=torch.float32)
    launch = activation.activation_launch(activation.kernel_silu_mul, positions(), products, grads)
    assert_fits(compile_launch(launch))
    kernel = activation.kernel_silu_mul_backward
    tensors = products, grads, weight, grads, products, weight
    assert_fits(compile_launch(activation.activation_launch(kernel, positions(), *tensors)))
