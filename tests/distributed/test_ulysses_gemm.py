"""The Ulysses ops with projections over real processes."""

from __future__ import annotations

from tests.distributed import ulysses_gemm_ranks
from tests.distributed.calls import under_checks


def test_random_calls(on_any):
    assert on_any(ulysses_gemm_ranks.random_calls, 2, 2) == [8] * 3


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, ulysses_gemm_ranks.random_calls, 7, 1) == [4, 4]


def test_gradients_of_attention(on_two):
    assert on_two(ulysses_gemm_ranks.gradients, [3, 5], 4, 2) == [5, 5]
