"""The plain collectives on GPUs: compiled kernels, NVLink; what CPU ranks check, and graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest

from tests.distributed import collective_ranks
from tests.distributed.collective_calls import ALGORITHMS, OPS
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
EACH_OP = pytest.mark.parametrize("op", list(OPS))


@few_ranks
@EACH_OP
def test_every_size_and_shape(on_gpus, op):
    assert set(on_gpus(collective_ranks.every_size, op)) == {36 * len(ALGORITHMS[op])}


@EACH_OP
def test_calls_need_nothing_between_them(on_gpus, op, rounds):
    number = rounds(300)
    calls = number + number // 3 + number // 5
    assert set(on_gpus(collective_ranks.back_to_back, op, number)) == {calls}


@few_ranks
def test_sizes_that_fill_gpu_and_links(on_gpus, alternate):
    number = 12 if alternate else 30  # each way of the op with most has each of three shapes
    assert set(on_gpus(collective_ranks.large_calls, number)) == {3 * number}


def test_two_ranks_sum_more_in_one_shot(on_gpus):
    assert set(on_gpus(collective_ranks.large_in_one_shot, 15 << 20)) == {1}


@few_ranks
def test_in_place_and_in_several_launches(on_gpus):
    assert set(on_gpus(collective_ranks.in_place_and_large)) == {
        4 * len(ALGORITHMS["all_reduce"]) + 1
    }


@EACH_OP
def test_any_rank_may_be_late(on_gpus, op):
    counts = on_gpus(collective_ranks.stragglers, op)
    assert counts == [(len(ALGORITHMS[op]) + 1) * len(counts)] * len(counts)


def test_nothing_old_is_read(on_gpus, rounds):
    number = rounds(20)
    (count,) = set(on_gpus(collective_ranks.poisoned, number))
    assert count == number * sum(map(len, ALGORITHMS.values()))


def test_all_ranks_and_ways_give_the_same_bits(on_gpus, rounds):
    number = rounds(20)
    assert set(on_gpus(collective_ranks.same_bits, number)) == {
        number * len(ALGORITHMS["all_reduce"])
    }


@few_ranks
@EACH_OP
def test_every_candidate_gives_the_same(on_gpus, op):
    (count,) = set(on_gpus(collective_ranks.every_config, op))
    assert count > 15


@few_ranks
@EACH_OP
def test_tuned_over_the_ranks(on_gpus, op):
    assert set(on_gpus(collective_ranks.tuned, op)) == {(2, 6)}


@EACH_OP
def test_captured_in_graphs(on_gpus, op, rounds):
    number = rounds(20)
    calls = number * (2 * len(ALGORITHMS[op]) + 1)
    assert set(on_gpus(collective_ranks.replayed, op, number)) == {calls}


@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_epochs_of_copy_engines_may_wrap_around(on_gpus, op):
    assert set(on_gpus(collective_ranks.pushed_epochs_wrap_around, op)) == {6}


@EACH_OP
def test_calls_are_counted_without_end(on_gpus, op):
    assert all(checked == 6 for _, checked in on_gpus(collective_ranks.calls_without_end, op))


@EACH_OP
def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus, op):
    first, *others = on_gpus(collective_ranks.give_up_and_start_again, op)
    assert len(first) == 2 * len(ALGORITHMS[op])
    assert all("arrivals" in flag or "packets" in flag for flag in first)
    assert others == [[]] * len(others)
