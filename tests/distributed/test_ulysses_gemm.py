"""The Ulysses ops with projections over real processes."""

from __future__ import annotations

import pytest

from tests.distributed import ulysses_gemm_ranks
from tests.distributed.calls import under_checks


@pytest.mark.parametrize(("world_size", "seed", "rounds"), [(2, 1, 1), (3, 2, 2)])
def test_random_calls(on_ranks, world_size, seed, rounds):
    count = on_ranks(world_size)(ulysses_gemm_ranks.random_calls, seed, rounds)
    assert count == [4 * rounds] * world_size


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, ulysses_gemm_ranks.random_calls, 7, 1) == [4, 4]


def test_gradients_of_attention(on_two):
    assert on_two(ulysses_gemm_ranks.gradients, [3, 5], 4, 2) == [5, 5]
