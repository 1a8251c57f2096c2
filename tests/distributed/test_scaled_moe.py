"""MoE ops with fp8 operands over real processes: the kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import scaled_moe_ranks as ranks
from tests.distributed.scaled_moe_ranks import E4M3, E5M2, GATHERS, SUMS


@pytest.mark.parametrize(
    ("size", "recipe", "m", "N", "K", "dtype", "library"),
    [
        (2, "row", 2, 16, 144, E4M3, True),
        (2, "block", 1, 131, 131, E5M2, False),
        (2, "tensor", 1, 7, 19, E4M3, False),
    ],
)
def test_scales_travel_with_the_rows(on_ranks, size, recipe, m, N, K, dtype, library):
    count = len(GATHERS) + library
    assert on_ranks(size)(ranks.gathered, recipe, m, N, K, dtype) == [count] * size


@pytest.mark.parametrize(
    ("size", "recipe", "all_rows", "m", "N", "k", "dtype"),
    [
        (2, "block", False, 1, 390, 129, torch.float32),  # chunks of whole blocks
        (3, "row", True, 2, 17, 33, torch.float32),
        pytest.param(2, "tensor", True, 1, 16, 16, torch.bfloat16, marks=pytest.mark.stress),
    ],
)
def test_sums_of_scaled_products(on_ranks, size, recipe, all_rows, m, N, k, dtype):
    count = {"block": 2, "row": len(SUMS), "tensor": len(SUMS) + 1}[recipe]
    assert on_ranks(size)(ranks.summed, recipe, all_rows, m, N, k, dtype) == [count] * size


def test_what_is_refused(on_two):
    on_two(ranks.refusals)
