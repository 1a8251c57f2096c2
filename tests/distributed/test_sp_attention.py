"""AllGather-attention over real processes: kernels in the interpreter, memory in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import sp_attention_ranks
from tests.distributed.calls import under_checks


@pytest.mark.parametrize(
    ("world_size", "seed", "rounds"),
    [(3, 2, 2), pytest.param(4, 3, 1, marks=pytest.mark.stress)],
)
def test_random_calls(on_ranks, world_size, seed, rounds):
    count = on_ranks(world_size)(sp_attention_ranks.random_calls, seed, rounds)
    assert count == [3 * rounds] * world_size


@pytest.mark.parametrize(
    ("world_size", "exchange_ranks"), [(4, 2), pytest.param(2, 1, marks=pytest.mark.stress)]
)
def test_layer_on_a_mesh(on_ranks, world_size, exchange_ranks):
    on_ranks(world_size)(
        sp_attention_ranks.layer, exchange_ranks, env={"TRITON_DIST_AUTOTUNE": "0"}
    )


def test_names_of_scripts(on_two):
    on_two(sp_attention_ranks.script_names, env={"TRITON_DIST_AUTOTUNE": "0"})


def test_calls_of_all_three_ops_alternate(on_two):
    assert on_two(sp_attention_ranks.replayed, 2) == [20, 20]


def test_no_race_and_no_access_out_of_bounds(on_two):
    assert on_two(under_checks, sp_attention_ranks.random_calls, 5, 1) == [3, 3]
