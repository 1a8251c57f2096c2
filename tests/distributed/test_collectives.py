"""The plain collectives over real processes: the kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import collective_ranks
from tests.distributed.collective_calls import ALGORITHMS, OPS

EACH_OP = pytest.mark.parametrize("op", list(OPS))


@EACH_OP
@pytest.mark.parametrize(
    ("dtype", "num_ranks"), list(zip(collective_ranks.DTYPES, (2, 3, 2), strict=True)), ids=str
)
def test_every_size_and_shape(spawn_ranks, op, dtype, num_ranks):
    """One dtype on an odd number of ranks."""
    counts = spawn_ranks(num_ranks, collective_ranks.every_size, op, (dtype,), 1)
    assert counts == [6 * len(ALGORITHMS[op])] * num_ranks


@EACH_OP
def test_calls_need_nothing_between_them(spawn_ranks, op):
    one_at_a_time = {"TRITON_DIST_RESIDENT_PROGRAMS": "1"}  # others may be busy with other streams
    counts = spawn_ranks(2, collective_ranks.back_to_back, op, 15, env=one_at_a_time)
    assert counts == [15 + 5 + 3] * 2


def test_in_place_and_in_several_launches(spawn_ranks):
    counts = spawn_ranks(3, collective_ranks.in_place_and_large)
    assert counts == [4 * len(ALGORITHMS["all_reduce"]) + 1] * 3


def test_two_ranks_sum_more_in_one_shot(spawn_ranks):
    assert spawn_ranks(2, collective_ranks.large_in_one_shot, 9 << 18) == [1] * 2


@EACH_OP
def test_any_rank_may_be_late(spawn_ranks, op):
    count = 3 * (len(ALGORITHMS[op]) + 1)
    assert spawn_ranks(3, collective_ranks.stragglers, op) == [count] * 3


@EACH_OP
def test_nothing_is_overwritten_before_it_is_read(spawn_ranks, op):
    counts = spawn_ranks(2, collective_ranks.late_readers, op)
    assert counts == [4 * len(set(ALGORITHMS[op]) - {"copy_engine"})] * 2


def test_nothing_old_is_read(spawn_ranks):
    assert (
        spawn_ranks(2, collective_ranks.poisoned, 3) == [3 * sum(map(len, ALGORITHMS.values()))] * 2
    )


def test_all_ranks_and_ways_give_the_same_bits(spawn_ranks):
    count = 3 * len(ALGORITHMS["all_reduce"])
    assert spawn_ranks(4, collective_ranks.same_bits, 3) == [count] * 4


@EACH_OP
def test_every_candidate_gives_the_same(spawn_ranks, op):
    first, second = spawn_ranks(2, collective_ranks.every_config, op)
    assert first == second == len(OPS[op][0].config_space) + 2


@EACH_OP
def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks, op):
    assert spawn_ranks(2, collective_ranks.tuned, op) == [(2, 6)] * 2
    assert spawn_ranks(2, collective_ranks.tuned, op) == [(0, 6)] * 2


def test_a_method_that_is_named_is_tuned_for_itself(spawn_ranks):
    found = spawn_ranks(2, collective_ranks.tuned_for_a_method)
    assert found == [["one_shot", "two_shot", "two_shot"]] * 2


def test_disjoint_groups_work_at_once(spawn_ranks):
    assert spawn_ranks(4, collective_ranks.in_groups, [[0, 2], [1, 3]]) == [12] * 4


@EACH_OP
def test_calls_are_counted_without_end(spawn_ranks, op):
    assert spawn_ranks(2, collective_ranks.calls_without_end, op) == [(6, 6)] * 2


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_epochs_of_copy_engines_may_wrap_around(spawn_ranks, op):
    assert spawn_ranks(2, collective_ranks.pushed_epochs_wrap_around, op) == [6] * 2


@EACH_OP
def test_a_call_that_gave_up_leaves_nothing_behind(spawn_ranks, op):
    first, second = spawn_ranks(2, collective_ranks.give_up_and_start_again, op)
    regions = {"copy_engine": "pushed.arrivals", "packets": "packets"}  # a slot's number follows
    flags = [flag.rstrip("01") for flag in first]
    assert flags == [
        f"{op}.{regions.get(name, 'arrivals')}" for name in ALGORITHMS[op] for _ in "12"
    ]
    assert second == []
