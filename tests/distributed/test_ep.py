"""Expert parallelism over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ep_group_gemm_ranks, ep_ranks
from tests.distributed.calls import under_checks
from triton_dist import knobs
from triton_dist.debugging.modes import interpreter_checks


@pytest.mark.parametrize(
    ("world_size", "seed", "rounds"),
    [(3, 2, 2), pytest.param(4, 3, 1, marks=pytest.mark.stress)],
)
def test_random_routings(on_ranks, world_size, seed, rounds):
    assert on_ranks(world_size)(ep_ranks.random_calls, seed, rounds) == [3 * rounds] * world_size


def test_any_rank_may_be_late(on_two):
    assert on_two(ep_ranks.stragglers, 4) == [4] * 2
    assert on_two(ep_ranks.replayed, 1, True) == [3] * 2


def test_every_candidate_gives_the_same(on_two):
    first, second = on_two(ep_ranks.every_config)
    assert first == second >= 4


def test_a_call_that_gave_up_leaves_nothing_behind(on_two):
    push = ["ep_dispatch.arrivals", "ep_combine.arrivals"]
    packets = ["ep_dispatch.packets", "ep_combine.arrivals"]
    assert on_two(ep_ranks.give_up_and_start_again) == [[*push, *packets], []]


def test_tuned_over_the_ranks(on_two):
    assert on_two(ep_ranks.tuned) == [(1, 1)] * 2


def test_rows_stay_until_the_next_call(on_two):
    assert all(rows >= 6 for rows in on_two(ep_ranks.rows_stay))


def test_every_rank_raises_what_one_did_wrong(on_two):
    for messages in on_two(ep_ranks.faults):
        assert messages == ["topk_ids", "topk_weights"]


@pytest.mark.skipif(
    "race" in interpreter_checks(knobs.debug.get()),
    reason="ranks that disagree about sizes write to the same places, which interp:race reports",
)
def test_different_arguments_are_an_error_on_every_rank(on_two):
    on_two(ep_ranks.different_arguments)


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, ep_ranks.checked) == [6] * 2


def test_fused_products_of_random_routings(on_any):
    assert on_any(ep_group_gemm_ranks.random_calls, 2, 2) == [6] * 3


def test_fused_products_of_arbitrary_counts(on_two):
    assert on_two(ep_group_gemm_ranks.tiles_of_arbitrary_counts) == [[0, 0, 0]] * 2


@pytest.mark.stress
def test_fused_products_without_race_and_access_out_of_bounds(on_two):
    assert on_two(under_checks, ep_group_gemm_ranks.random_calls, 1, 3) == [9] * 2


def test_fused_products_tuned_over_the_ranks(on_two):
    assert on_two(ep_group_gemm_ranks.tuned) == [1] * 2
