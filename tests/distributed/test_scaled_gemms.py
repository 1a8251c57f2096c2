"""GEMMs of fp8 operands across ranks: recipes, algorithms and ranks that disagree."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import scaled_gemm_ranks
from triton_dist.kernels.common.gemm.scales import FP8

E4M3, E5M2 = FP8


def _rare(*values):
    return pytest.param(*values, marks=pytest.mark.stress)


@pytest.mark.parametrize("recipe", ["block", *(_rare(recipe) for recipe in ("tensor", "row"))])
def test_ag_gemm_of_every_recipe(on_any, on_two, recipe):
    # Partial blocks of K, read by descriptors; then an odd K, read by pointers.
    for run, *size in (
        (on_any, 9, 40, 272, E4M3, torch.bfloat16),
        (on_two, 1, 33, 145, E5M2, torch.float32),
    ):
        for errors in run(scaled_gemm_ranks.ag_gemm_of, recipe, *size):
            assert len(errors) == 7
            assert max(errors) <= 1


def test_ranks_that_disagree_on_scales(on_two):
    for seen in on_two(scaled_gemm_ranks.one_rank_has_another_recipe):
        assert [name for name, _ in seen] == ["RankDisagreement"] * 4
        assert "(False, False)" in seen[1][1]
        assert "(True, False)" in seen[1][1]


def test_kernels_detect_scales_of_another_layout(on_any):
    for rank, seen in enumerate(on_any(scaled_gemm_ranks.scales_of_another_layout)):
        assert len(seen) == 4
        for by_rank in seen:
            layout = "blocks" if rank == 1 else "rows"
            assert by_rank[rank] == f"6 rows, scales of {layout}"
            assert set(by_rank.values()) == {"6 rows, scales of rows", "6 rows, scales of blocks"}


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gemm_rs", "row"),
        ("gemm_ar", "tensor"),
        *(_rare("gemm_rs", recipe) for recipe in ("tensor", "block")),
        *(_rare("gemm_ar", recipe) for recipe in ("row", "block")),
    ],
)
def test_sums_of_every_recipe(on_any, on_two, name, recipe):
    # An odd K is read by pointers. Blocks must be whole.
    odd = 256 if recipe == "block" else 145
    for run, *size in ((on_any, 19, 40, 256, torch.bfloat16), (on_two, 7, 33, odd, torch.float32)):
        for errors in run(scaled_gemm_ranks.sum_of, name, recipe, *size):
            assert len(errors) >= 6
            assert max(errors) <= 1
