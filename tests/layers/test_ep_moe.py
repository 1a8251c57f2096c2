"""Expert-parallel layers against one process: results, gradients, weights, graphs."""

from __future__ import annotations

import functools

import pytest

from tests.layers import ep_ranks
from tests.layers.conftest import FIRST_CONFIG


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_random_routings(on_ranks, num_ranks):
    run = functools.partial(on_ranks(num_ranks), env=FIRST_CONFIG)
    assert run(ep_ranks.random_routings, num_ranks, 2) == [20] * num_ranks


@pytest.mark.parametrize(
    ("kind", "pairs"), [("qwen", 5), ("stacked", 5), ("deepseek", 8), ("gated", 9)]
)
def test_layers(on_two_ranks, kind, pairs):
    assert on_two_ranks(ep_ranks.layers_like_one_process, kind) == [pairs, pairs]


def test_a_replayed_graph(on_two_ranks):
    assert on_two_ranks(ep_ranks.replayed, "gated") == [3, 3]


def test_what_is_refused(on_two_ranks):
    on_two_ranks(ep_ranks.refused)
