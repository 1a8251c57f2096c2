"""The Ulysses ops over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ulysses_ranks


@pytest.mark.parametrize(("world_size", "seed", "rounds"), [(2, 1, 3), (3, 2, 2), (4, 3, 2)])
def test_random_calls(on_ranks, world_size, seed, rounds):
    count = on_ranks(world_size)(ulysses_ranks.random_calls, seed, rounds)
    assert count == [3 * rounds] * world_size
