"""Dispatch + grouped GEMM over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

from tests.distributed import ep_group_gemm_ranks


def test_random_routings_with_late_ranks(on_ranks):
    assert on_ranks(3)(ep_group_gemm_ranks.random_calls, 2, 2) == [6] * 3


def test_random_routings_without_race_and_access_out_of_bounds(on_two):
    assert on_two(ep_group_gemm_ranks.checked_calls, 1, 3) == [9] * 2


def test_tuned_over_the_ranks(on_two):
    assert on_two(ep_group_gemm_ranks.tuned) == [1, 1]
