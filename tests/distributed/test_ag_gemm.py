"""AllGather-GEMM over real processes: the kernels in the interpreter, memory in /dev/shm.

Three ranks where their number could matter: a ring, two peers, and no power of two.
"""

from __future__ import annotations

import pytest

from tests.distributed import ag_gemm_ranks
from triton_dist.kernels.common.gemm.launch import fused_tiles, split_k_tiles
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS


def test_every_schedule_and_both_kernels(spawn_ranks):
    # Room for the programs that send is enough, since others may be busy with other streams.
    room = {"TRITON_DIST_RESIDENT_PROGRAMS": "2"}
    assert spawn_ranks(3, ag_gemm_ranks.every_schedule, env=room) == [16] * 3


@pytest.mark.parametrize("dtype", ag_gemm_ranks.DTYPES)
def test_every_size_and_layout(spawn_ranks, dtype):
    assert spawn_ranks(2, ag_gemm_ranks.every_operand, (dtype,)) == [24] * 2


def test_calls_need_nothing_between_them(spawn_ranks):
    assert spawn_ranks(3, ag_gemm_ranks.back_to_back, 12) == [16] * 3


def test_any_rank_may_be_late(spawn_ranks):
    assert spawn_ranks(3, ag_gemm_ranks.stragglers) == [6 * 3] * 3


def test_every_candidate_gives_the_same(spawn_ranks):
    checked = len(ALGORITHMS.config_space()) + 2
    assert spawn_ranks(3, ag_gemm_ranks.every_config) == [checked] * 3


def test_tiles_that_are_cut_along_k(spawn_ranks):
    calls = 3 * (3 * len(split_k_tiles()) + 1)
    assert spawn_ranks(3, ag_gemm_ranks.split_tiles) == [calls] * 3


def test_shards_that_the_consumer_sends_itself(spawn_ranks):
    rounds = 4  # each other method has its turn
    calls = rounds * (2 * len(fused_tiles()) + 4)
    assert spawn_ranks(3, ag_gemm_ranks.fused_push, rounds) == [calls] * 3


def test_counts_of_parts_are_reset(spawn_ranks):
    assert spawn_ranks(2, ag_gemm_ranks.counts_are_reset) == [[0, len(split_k_tiles())]] * 2


def test_tuned_over_the_ranks(spawn_ranks):
    assert spawn_ranks(2, ag_gemm_ranks.tuned) == [(2, 6)] * 2


def test_disjoint_groups_work_at_once(spawn_ranks):
    assert spawn_ranks(4, ag_gemm_ranks.in_groups, [[0, 2], [1, 3]], False) == [5, 6, 5, 6]


def test_disjoint_groups_tune_at_once(spawn_ranks):
    assert spawn_ranks(4, ag_gemm_ranks.in_groups, [[3, 0], [1, 2]], True) == [6] * 4


def test_a_group_of_one_beside_one_of_two(spawn_ranks):
    assert spawn_ranks(3, ag_gemm_ranks.in_groups, [[2], [0, 1]], False) == [6, 6, 5]


def test_epochs_may_wrap_around(spawn_ranks):
    assert spawn_ranks(3, ag_gemm_ranks.epochs_wrap_around) == [16] * 3


def test_what_is_too_large_for_one_launch_is_said(spawn_ranks):
    for message in spawn_ranks(2, ag_gemm_ranks.too_many_rows_for_serial):
        assert message.startswith("ag_gemm: algorithm is 'serial', expected another algorithm for")
        assert "M > 10 " in message


def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks):
    first, second = spawn_ranks(2, ag_gemm_ranks.give_up_and_start_again)
    others = [f"ag_gemm.{flags}0" for flags in ("arrivals", "pushed")]
    others.append("the exchange of ag_gemm.arrivals")
    # After the three calls of a method that follow a reset, the next one has the first slot again;
    # after those of the serial one, which take none, the second.
    assert first == ["ag_gemm.arrivals0", *others, "ag_gemm.arrivals1", *others]
    assert second == []


def test_a_reset_lets_copies_go_on(spawn_ranks):
    assert spawn_ranks(4, ag_gemm_ranks.copies_held_up) == [5] * 4


def test_only_calls_out_of_turn_look_at_their_peers(spawn_ranks):
    looks = spawn_ranks(3, ag_gemm_ranks.looks_at_peers)
    assert looks == [ag_gemm_ranks.LOOKS] * 3


def test_vendor_methods_take_turns_with_ours(spawn_ranks):
    assert spawn_ranks(3, ag_gemm_ranks.library_alternating, 4) == [8] * 3


def test_calls_from_another_thread(spawn_ranks):
    assert spawn_ranks(2, ag_gemm_ranks.from_another_thread) == [7] * 2


def test_transfer_and_consumer_apart(spawn_ranks):
    spawn_ranks(3, ag_gemm_ranks.consumer_alone)


def test_one_row_with_any_stride(spawn_ranks):
    spawn_ranks(2, ag_gemm_ranks.strides_of_one_row)
