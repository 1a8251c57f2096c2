"""The Ulysses ops over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import ulysses_ranks
from tests.distributed.calls import under_checks
from triton_dist import knobs
from triton_dist.debugging.modes import interpreter_checks


@pytest.mark.parametrize(
    ("world_size", "seed", "rounds"),
    [(3, 2, 2), pytest.param(4, 3, 1, marks=pytest.mark.stress)],
)
def test_random_calls(on_ranks, world_size, seed, rounds):
    count = on_ranks(world_size)(ulysses_ranks.random_calls, seed, rounds)
    assert count == [3 * rounds] * world_size


@pytest.mark.parametrize(("lengths", "heads", "kv"), [([3, 5], 4, 2), ([4, 1, 0], 6, 1)])
def test_gradients_of_attention(on_ranks, lengths, heads, kv):
    size = len(lengths)
    assert on_ranks(size)(ulysses_ranks.gradients, lengths, heads, kv) == [3] * size


@pytest.mark.skipif(
    "race" in interpreter_checks(knobs.debug.get()), reason="ranks with different sizes do race"
)
def test_different_lengths_are_an_error_on_every_rank(on_two):
    on_two(ulysses_ranks.different_lengths)


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, ulysses_ranks.random_calls, 7, 1) == [3, 3]
