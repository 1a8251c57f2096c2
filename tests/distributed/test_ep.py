"""Expert parallelism over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ep_ranks


@pytest.mark.parametrize(("world_size", "seed", "rounds"), [(2, 1, 3), (3, 2, 2), (4, 3, 2)])
def test_random_routings(on_ranks, world_size, seed, rounds):
    assert on_ranks(world_size)(ep_ranks.random_calls, seed, rounds) == [3 * rounds] * world_size


def test_any_rank_may_be_late(on_two):
    assert on_two(ep_ranks.stragglers, 6) == [6] * 2
    assert on_two(ep_ranks.replayed, 2, True) == [4] * 2


def test_tuned_over_the_ranks(on_two):
    assert on_two(ep_ranks.tuned) == [(1, 1)] * 2


def test_rows_stay_until_the_next_call(on_two):
    assert all(rows >= 6 for rows in on_two(ep_ranks.rows_stay))


def test_every_rank_raises_what_one_did_wrong(on_two):
    for messages in on_two(ep_ranks.faults):
        assert messages == ["topk_ids", "topk_weights"]
