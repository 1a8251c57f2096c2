"""The plain collectives over real processes: what ``test_each_op.py`` does not test of all ops."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import collective_ranks
from tests.distributed.collective_calls import COLLECTIVES, AllGather, AllReduce, ReduceScatter

KINDS = pytest.mark.parametrize("kind", [AllReduce, ReduceScatter], ids=["sum", "scatter"])


@pytest.mark.parametrize(
    ("kind", "dtype", "num_ranks"),
    [
        (AllReduce, torch.float32, 3),
        (ReduceScatter, torch.bfloat16, 3),
        (AllGather, torch.float32, 2),
    ],
)
def test_every_size_and_shape(on_ranks, kind, dtype, num_ranks):
    counts = on_ranks(num_ranks)(collective_ranks.every_size, kind, (dtype,), 1)
    assert counts == [4 * len(kind.names)] * num_ranks


def test_in_place_and_in_several_launches(on_any):
    assert set(on_any(collective_ranks.in_place_and_large)) == {4 * len(AllReduce.names) + 1}


@pytest.mark.stress
def test_two_ranks_sum_more_in_one_shot(on_ranks):
    assert on_ranks(2)(collective_ranks.large_in_one_shot, 9 << 18) == [1] * 2


@KINDS
def test_nothing_is_overwritten_before_it_is_read(on_ranks, kind):
    counts = on_ranks(2)(collective_ranks.late_readers, kind)
    assert counts == [4 * len(set(kind.names) - {"copy_engine"})] * 2


def test_nothing_old_is_read(on_two, rounds):
    number = rounds(20, cpu=2)
    algorithms = sum(len(kind.names) for kind in COLLECTIVES.values())
    assert set(on_two(collective_ranks.poisoned, number)) == {number * algorithms}


def test_all_ranks_and_algorithms_give_the_same_bits(on_any):
    assert on_any(collective_ranks.same_bits, 1) == [len(AllReduce.names)] * 3


@KINDS
def test_calls_are_counted_without_end(on_two, kind):
    assert set(on_two(collective_ranks.calls_without_end, kind)) == {(6, 6)}
