"""Expert parallelism over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ep_ranks


@pytest.mark.parametrize(("world_size", "seed"), [(2, 1), (3, 2), (4, 3)])
def test_random_routings(on_ranks, world_size, seed):
    rounds = 6
    assert on_ranks(world_size)(ep_ranks.random_calls, seed, rounds) == [3 * rounds] * world_size
