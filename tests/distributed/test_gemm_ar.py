"""GEMM-AllReduce over real processes: the kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import gemm_ar_ranks
from triton_dist.kernels.nvidia.gemm_allreduce_space import config_space

WORLD_SIZES = [2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_way_and_both_kernels(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.every_way) == [24] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_number_of_rows(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.every_size, world_size) == [40] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_slabs_in_any_number_of_chunks(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.chunked, 6) == [18] * world_size


def test_a_kernel_that_raises_leaves_nothing_queued(spawn_ranks):
    assert spawn_ranks(2, gemm_ar_ranks.a_kernel_that_raises) == [3] * 2


@pytest.mark.parametrize("dtype", gemm_ar_ranks.DTYPES)
def test_every_size_and_layout(spawn_ranks, dtype):
    assert spawn_ranks(2, gemm_ar_ranks.every_operand, (dtype,)) == [40] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_calls_need_nothing_between_them(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.back_to_back, 24) == [32] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_rank_may_be_late(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.stragglers) == [7 * world_size] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_same_operands_give_the_same_bits(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.same_bits, 2) == [10] * world_size


def test_every_rank_has_the_same_bits(spawn_ranks):
    assert spawn_ranks(4, gemm_ar_ranks.same_bits_on_all_ranks) == [12] * 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_result_without_a_copy_outlives_the_next_call(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.borrowed_results) == [7] * world_size


def test_every_candidate_gives_the_same(spawn_ranks):
    count = len(config_space()) + 2
    assert spawn_ranks(2, gemm_ar_ranks.every_config, timeout=100) == [count] * 2


@pytest.mark.timeout(200)
def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks):
    assert spawn_ranks(2, gemm_ar_ranks.tuned, timeout=90) == [(3, 9)] * 2
    assert spawn_ranks(2, gemm_ar_ranks.tuned, timeout=90) == [(0, 9)] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_whole_products_take_turns_with_tiles(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.whole_in_turn, 6) == [18] * world_size


def test_disjoint_groups_work_at_once(spawn_ranks):
    assert spawn_ranks(4, gemm_ar_ranks.in_groups, [[0, 2], [1, 3]]) == [4] * 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_epochs_may_wrap_around(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_ar_ranks.epochs_wrap_around) == [15] * world_size


def test_calls_of_two_contexts_alternate(spawn_ranks):
    assert spawn_ranks(2, gemm_ar_ranks.replayed, 2) == [24] * 2


def test_only_calls_out_of_turn_look_at_their_peers(spawn_ranks):
    looks = [0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert spawn_ranks(2, gemm_ar_ranks.looks_at_peers) == [looks] * 2


def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks):
    first, second = spawn_ranks(2, gemm_ar_ranks.give_up_and_start_again)
    flags = ["all_reduce.arrivals"] * 2 + ["gemm_ar.arrivals"] * 8 + ["all_reduce.arrivals"] * 2
    assert [flag.rstrip("01") for flag in first] == flags
    assert second == []


def test_a_context_ends_once(spawn_ranks):
    for seen in spawn_ranks(2, gemm_ar_ranks.context_ends):
        assert all("was finalized" in message for message in seen[:3])
        assert seen[3:] == ["raised through"]


def test_operands_that_require_grad_leave_no_history(spawn_ranks):
    spawn_ranks(2, gemm_ar_ranks.trainable_operands)


def test_inference_mode(spawn_ranks):
    assert spawn_ranks(2, gemm_ar_ranks.in_inference_mode) == [6] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_bad_call_names_the_argument_and_launches_nothing(spawn_ranks, world_size):
    for seen in spawn_ranks(world_size, gemm_ar_ranks.every_bad_call):
        assert list(seen) == list(gemm_ar_ranks.bad_calls())
        for case, (argument, message, launched) in seen.items():
            assert argument == case.split(" (")[0]
            assert message.startswith(f"gemm_ar: {argument} is ")
            assert launched == 0, case


def test_what_is_too_large_for_one_shot_is_said(spawn_ranks):
    for message in spawn_ranks(2, gemm_ar_ranks.too_large_for_one_shot):
        assert message.startswith("gemm_ar: method is GEMMAllReduceMethod.ONE_SHOT, expected ")
        assert "an M of more than 2" in message


def test_a_bad_context_names_the_argument(spawn_ranks):
    for seen in spawn_ranks(2, gemm_ar_ranks.every_bad_context):
        kind, message = seen.pop("one rank differs")
        assert kind == "RankDisagreement"
        assert "rank 1: (6, 41," in message
        for case, (argument, message) in seen.items():
            assert argument == case
            assert message.startswith(f"create_gemm_ar_context: {argument} is ")
