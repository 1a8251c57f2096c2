"""Expert-parallel layers against one process: results, gradients, weights, graphs."""

from __future__ import annotations

import functools

import pytest

from tests.layers import ep_ranks
from tests.layers.conftest import FIRST_CONFIG


@pytest.mark.parametrize(
    ("num_ranks", "rounds"),
    # Every second round has exact sizes.
    [(3, 2), *(pytest.param(*each, marks=pytest.mark.stress) for each in ((2, 2), (4, 9)))],
)
def test_random_routings(on_ranks, num_ranks, rounds):
    run = functools.partial(on_ranks(num_ranks), env=FIRST_CONFIG)
    assert run(ep_ranks.random_routings, num_ranks, rounds) == [10 * rounds] * num_ranks


@pytest.mark.parametrize(
    ("kind", "pairs"),
    [
        pytest.param("qwen", 5, marks=pytest.mark.stress),
        ("stacked", 5),
        pytest.param("deepseek", 8, marks=pytest.mark.stress),
        ("gated", 9),
    ],
)
def test_layers(on_two_ranks, kind, pairs):
    assert on_two_ranks(ep_ranks.layers_like_one_process, kind) == [pairs, pairs]


@pytest.mark.parametrize(
    ("kind", "pairs", "num_ranks"),
    [
        pytest.param("stacked", 5, 4, marks=pytest.mark.stress),
        pytest.param("deepseek", 8, 4, marks=pytest.mark.stress),
        ("stacked", 5, 2),
        pytest.param("gated", 9, 2, marks=pytest.mark.stress),
    ],
)
def test_ranks_that_share_experts(on_ranks, kind, pairs, num_ranks):
    run = functools.partial(on_ranks(num_ranks), env=FIRST_CONFIG)
    assert run(ep_ranks.layers_like_one_process, kind, 2) == [pairs] * num_ranks


def test_a_replayed_graph(on_two_ranks):
    assert on_two_ranks(ep_ranks.replayed, "gated") == [3, 3]


def test_what_is_refused(on_two_ranks):
    on_two_ranks(ep_ranks.refused)
