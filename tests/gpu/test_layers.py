"""The tensor-parallel layers on GPUs: gradients, one graph by inductor, CUDA graphs, real sizes.

The functions of the ranks are those of tests/layers. Nothing is tuned: which config multiplies is
not what layers are about.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.layers import ep_ranks, functional_ranks, layer_ranks
from triton_dist.testing.rank_pool import RankPool

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.fixture(scope="module")
def _pool():
    with RankPool(2, {"TRITON_DIST_AUTOTUNE": "0"}, device="cuda", share_gpus=True) as pool:
        yield pool


@pytest.fixture
def on_two(_pool):
    return functools.partial(_pool.run, timeout=240)


def test_gradients(on_two):
    assert on_two(functional_ranks.gradients_of_ops) == [14, 14]


def test_no_grad_inference_mode_and_autocast(on_two):
    assert on_two(functional_ranks.without_gradients) == [4, 4]


@pytest.mark.parametrize(
    ("kv_heads", "is_spread", "experts", "count"),
    [(2, True, 0, 11), (1, False, 0, 11), (2, True, 4, 12), (2, False, 4, 12)],
)
def test_a_training_step(on_two, kv_heads, is_spread, experts, count):
    assert on_two(layer_ranks.training, kv_heads, is_spread, experts, 1e-3) == [count] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expert_parallel_routings(on_two, dtype):
    assert on_two(ep_ranks.random_routings, 1, 2, dtype) == [20, 20]


@pytest.mark.parametrize(("kind", "pairs"), [("stacked", 5), ("deepseek", 8), ("gated", 9)])
def test_expert_parallel_layers(on_two, kind, pairs):
    assert on_two(ep_ranks.layers_like_one_process, kind, 1, 2e-3) == [pairs, pairs]


def test_an_expert_parallel_layer_in_a_cuda_graph(on_two):
    assert on_two(ep_ranks.replayed, "gated", 6) == [6, 6]


def test_call_forms(on_two):
    assert on_two(layer_ranks.call_forms) == [7, 7]
    assert on_two(layer_ranks.experts_call_forms) == [4, 4]
    assert on_two(layer_ranks.with_a_cache) == [12, 12]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_in_a_cuda_graph(on_two, dtype):
    assert on_two(layer_ranks.steps_in_a_graph, dtype) == [6, 6]


def test_one_graph_by_inductor(on_two):
    assert on_two(layer_ranks.compiled, "inductor") == [2 * 12 + 2 * 13] * 2


def test_cuda_graphs_of_inductor(on_two):
    assert on_two(layer_ranks.compiled_steps) == [6, 6]


def test_sizes_of_a_model(on_two):
    for apart in on_two(layer_ranks.large_layers, 512, 4096, 14336):
        assert len(apart) == 6
        assert max(apart.values()) < 2e-2, apart
