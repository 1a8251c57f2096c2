"""Ops that sum products over ranks, over real processes: the kernels in the interpreter, memory in
/dev/shm.

Three ranks where their number could matter: a ring, two peers, and no power of two.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import gemm_ar_calls, gemm_rs_calls, summed_gemm_ranks


@pytest.fixture(params=[gemm_ar_calls.Calls, gemm_rs_calls.Calls], ids=lambda kind: kind.name)
def kind(request):
    """What there is to know of the op."""
    return request.param


def test_every_way_and_both_kernels(spawn_ranks, kind):
    # Room for two makes programs pass each other.
    residents = {"TRITON_DIST_RESIDENT_PROGRAMS": "2"}
    counts = spawn_ranks(3, summed_gemm_ranks.every_algorithm, kind, 1, env=residents)
    assert counts == [2 * len(kind.algorithms)] * 3


def test_row_blocks_in_any_number_of_chunks(spawn_ranks, kind):
    assert spawn_ranks(3, summed_gemm_ranks.chunked, kind, 6) == [18] * 3


def test_a_kernel_that_raises_leaves_nothing_queued(spawn_ranks, kind):
    assert spawn_ranks(2, summed_gemm_ranks.a_kernel_that_raises, kind) == [6] * 2


@pytest.mark.parametrize(
    ("dtype", "first", "step"),
    [(torch.float16, 0, 1), (torch.bfloat16, 0, 2), (torch.float32, 1, 2)],
)
def test_every_size_and_layout(spawn_ranks, kind, dtype, first, step):
    """One dtype at all sizes, the others at half of them each."""
    counts = spawn_ranks(2, summed_gemm_ranks.every_operand, kind, (dtype,), first, step)
    assert counts == [40 // step] * 2


def test_calls_need_nothing_between_them(spawn_ranks, kind):
    one_at_a_time = {"TRITON_DIST_RESIDENT_PROGRAMS": "1"}  # others may be busy with other streams
    counts = spawn_ranks(3, summed_gemm_ranks.back_to_back, kind, 15, env=one_at_a_time)
    assert counts == [15 + 5] * 3


def test_any_rank_may_be_late(spawn_ranks, kind):
    count = 3 * (len(kind.algorithms) + 1)
    assert spawn_ranks(3, summed_gemm_ranks.stragglers, kind) == [count] * 3


def test_the_same_operands_give_the_same_bits(spawn_ranks, kind):
    counts = spawn_ranks(3, summed_gemm_ranks.same_bits, kind, 2)
    assert counts == [2 * len(kind.tiled)] * 3


def test_every_candidate_gives_the_same(spawn_ranks, kind):
    count = len(kind.config_space()) + 2
    assert spawn_ranks(2, summed_gemm_ranks.every_config, kind, timeout=200) == [count] * 2


def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks, kind):
    tunings = len(kind.tuned_calls)
    for count in (tunings, 0):
        seen = spawn_ranks(2, summed_gemm_ranks.tuned, kind, timeout=200)
        assert seen == [(count, 3 * tunings)] * 2


def test_disjoint_groups_work_at_once(spawn_ranks, kind):
    assert spawn_ranks(4, summed_gemm_ranks.in_groups, kind, [[0, 2], [1, 3]]) == [4] * 4


def test_epochs_may_wrap_around(spawn_ranks, kind):
    counts = spawn_ranks(2, summed_gemm_ranks.epochs_wrap_around, kind, 3)
    assert counts == [3 * len(kind.epoch_algorithms)] * 2


def test_only_calls_out_of_turn_look_at_their_peers(spawn_ranks, kind):
    assert spawn_ranks(2, summed_gemm_ranks.looks_at_peers, kind) == [list(kind.looks)] * 2


def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks, kind):
    first, second = spawn_ranks(2, summed_gemm_ranks.give_up_and_start_again, kind)
    assert first == list(kind.overdue)
    assert second == []
