"""The linear layer on GEMM-AllReduce."""

from __future__ import annotations

import pytest

from tests.layers import gemm_ar_layer_ranks

# Which config multiplies is not what these are about. Calls are tuned in `test_as_scripts_call_it`,
# and on the page of the layer.
FIRST_CONFIG = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_is_a_linear_layer(spawn_ranks, world_size):
    calls = spawn_ranks(world_size, gemm_ar_layer_ranks.as_a_linear_layer, env=FIRST_CONFIG)
    assert calls == [10] * world_size


def test_its_state_is_saved_and_loaded(spawn_ranks):
    saved = spawn_ranks(2, gemm_ar_layer_ranks.by_a_state_dict, env=FIRST_CONFIG)
    assert saved == [["weight", "bias"]] * 2


def test_mistakes_are_said(spawn_ranks):
    starts = (
        "GemmARLayer: K is 15, expected a positive multiple of the group's size 2",
        "create_gemm_ar_context: max_M is 0, expected at least 1",
        "load_weight: weight.shape is (16, 8), expected [N, K] = (16, 16)",
        "load_weight: bias is ",
        "gemm_ar: M is 5, expected at most the context's max_M = 4",
        "GemmARLayer: weight is None, expected a tensor [N, K_per_rank]",
        "load_weight: self is 'GemmARLayer', expected has_weight=True",
    )
    for seen in spawn_ranks(2, gemm_ar_layer_ranks.mistakes):
        assert len(seen) == len(starts)
        assert all(map(str.startswith, seen, starts))


def test_as_scripts_call_it(spawn_ranks):
    starts = (
        "GemmARLayer: scale_a is (9,), expected None: products of int8 and fp8 are not supported",
        "GemmARLayer: scale_b is (9,), expected None",
        "GemmARLayer: output_dtype is torch.float16, expected input_dtype, torch.int8",
        "create_gemm_ar_context: output_dtype is torch.int8, expected ",
        "GemmARLayer: K is 129, expected a positive multiple of the group's size 2",
    )
    for count, refused in spawn_ranks(2, gemm_ar_layer_ranks.as_scripts_call_it):
        assert count == 9
        assert len(refused) == len(starts)
        assert all(map(str.startswith, refused, starts)), refused
