"""GEMM-ReduceScatter over real processes: the kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import gemm_rs_ranks
from triton_dist.kernels.nvidia.gemm_reduce_scatter import config_space

WORLD_SIZES = [2, 4]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_way_and_both_kernels(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.every_way) == [24] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_slabs_in_any_number_of_chunks(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.chunked, 6) == [18] * world_size


def test_a_kernel_that_raises_leaves_nothing_queued(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.a_kernel_that_raises) == [3] * 2


@pytest.mark.parametrize("dtype", gemm_rs_ranks.DTYPES)
def test_every_size_and_layout(spawn_ranks, dtype):
    assert spawn_ranks(2, gemm_rs_ranks.every_operand, (dtype,)) == [40] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_calls_need_nothing_between_them(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.back_to_back, 24) == [32] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_any_rank_may_be_late(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.stragglers) == [4 * world_size] * world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_same_operands_give_the_same_bits(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.same_bits, 3) == [6] * world_size


def test_every_candidate_gives_the_same(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.every_config) == [len(config_space()) + 2] * 2


def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.tuned) == [(2, 6)] * 2
    assert spawn_ranks(2, gemm_rs_ranks.tuned) == [(0, 6)] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_vendor_methods_take_turns_with_ours(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.vendor_in_turn, 4) == [8] * world_size


def test_disjoint_groups_work_at_once(spawn_ranks):
    assert spawn_ranks(4, gemm_rs_ranks.in_groups, [[0, 2], [1, 3]]) == [4] * 4


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_epochs_may_wrap_around(spawn_ranks, world_size):
    assert spawn_ranks(world_size, gemm_rs_ranks.epochs_wrap_around) == [12] * world_size


def test_calls_of_two_contexts_alternate(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.replayed, 3) == [18] * 2


def test_only_calls_out_of_turn_look_at_their_peers(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.looks_at_peers) == [[1, 0, 0, 1, 1, 0]] * 2


def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks):
    first, second = spawn_ranks(2, gemm_rs_ranks.give_up_and_start_again)
    assert [flag[:-1] for flag in first] == ["gemm_rs.arrivals"] * 6
    assert second == []


def test_a_context_ends_once(spawn_ranks):
    for seen in spawn_ranks(2, gemm_rs_ranks.context_ends):
        assert all("was finalized" in message for message in seen[:3])
        assert seen[3:] == ["raised through"]


def test_operands_that_require_grad_leave_no_history(spawn_ranks):
    spawn_ranks(2, gemm_rs_ranks.trainable_operands)


def test_inference_mode(spawn_ranks):
    assert spawn_ranks(2, gemm_rs_ranks.in_inference_mode) == [3] * 2


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_bad_call_names_the_argument_and_launches_nothing(spawn_ranks, world_size):
    for seen in spawn_ranks(world_size, gemm_rs_ranks.every_bad_call):
        assert list(seen) == list(gemm_rs_ranks.bad_calls(world_size))
        for case, (argument, message, launched) in seen.items():
            assert argument == case.split(" (")[0]
            assert message.startswith(f"gemm_rs: {argument} is ")
            assert launched == 0, case


def test_a_bad_context_names_the_argument(spawn_ranks):
    for seen in spawn_ranks(2, gemm_rs_ranks.every_bad_context):
        kind, message = seen.pop("one rank differs")
        assert kind == "RankDisagreement"
        assert "rank 1: (12, 41," in message
        for case, (argument, message) in seen.items():
            assert argument == case
            assert message.startswith(f"create_gemm_rs_context: {argument} is ")
