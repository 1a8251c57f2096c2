"""Expert parallelism over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ep_ranks


@pytest.mark.parametrize(("world_size", "seed", "rounds"), [(2, 1, 5), (3, 2, 4), (4, 3, 3)])
def test_random_routings(on_ranks, world_size, seed, rounds):
    assert on_ranks(world_size)(ep_ranks.random_calls, seed, rounds) == [3 * rounds] * world_size


def test_any_rank_may_be_late(on_two):
    assert on_two(ep_ranks.stragglers, 12) == [12] * 2
    assert on_two(ep_ranks.replayed, 1, True) == [4] * 2
