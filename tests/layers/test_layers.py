"""The tensor-parallel layers: against the stock modules that they are made of, on one rank."""

from __future__ import annotations

import pytest

from tests.layers import layer_ranks


@pytest.mark.parametrize("is_spread", [True, False], ids=["sequence-parallel", "all-reduce"])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_training_step(on_two_ranks, kv_heads, is_spread):
    """Gradients: of 6 weights that are shared out, in 4 parameters; of 7 that are kept whole."""
    assert on_two_ranks(layer_ranks.training, kv_heads, is_spread) == [11, 11]


@pytest.mark.parametrize("is_spread", [True, False], ids=["sequence-parallel", "all-reduce"])
def test_a_training_step_with_experts(on_two_ranks, is_spread):
    """Besides those of attention and norms: of two stacks of weights, and of the router."""
    assert on_two_ranks(layer_ranks.training, 2, is_spread, 4) == [12, 12]


@pytest.mark.stress
def test_one_graph(on_two_ranks):
    """The loss, and gradients of 11 parameters."""
    assert on_two_ranks(layer_ranks.compiled, "aot_eager", None, True) == [12, 12]


def test_layers_of_experts_in_one_graph(on_two_ranks):
    assert on_two_ranks(layer_ranks.each_in_one_graph) == [["TP_MoE", "EP_MoE"]] * 2


def test_call_forms_of_experts(on_two_ranks):
    assert on_two_ranks(layer_ranks.experts_call_forms) == [4, 4]


def test_call_forms_of_scripts(on_two_ranks):
    assert on_two_ranks(layer_ranks.call_forms) == [7, 7]


def test_prefill_and_decode_with_a_cache_of_a_head_that_ranks_share(on_two_ranks):
    """With a head for each: test_llm.py."""
    assert on_two_ranks(layer_ranks.with_a_cache, 1) == [12, 12]


def test_a_cache_by_the_name_of_any_version_of_transformers(on_two_ranks):
    assert on_two_ranks(layer_ranks.caches_of_every_name) == [3, 3]


def test_a_module_in_two_places_stays_one(on_two_ranks):
    assert on_two_ranks(layer_ranks.shared_twice) == [(1, 2)] * 2


def test_replicas_tune_apart(on_ranks):
    """Two of two ranks each, with batches of different sizes."""
    assert on_ranks(4)(layer_ranks.two_replicas) == [6, 6, 40, 40]


def test_mistakes_are_said(on_two_ranks):
    starts = (
        "TP_MLP: rank is 2, expected ",
        "TP_MLP: world_size is 3, expected 2, the size of the group",
        "TP_MLP: module is <class 'torch.nn.modules.linear.Linear'>, expected a module with gate_",
        "TP_MLP: columns of gate_proj is 49, expected a multiple of the 2 ranks",
        "TP_MLP: up_proj.weight.shape is (50, 32), expected [outputs, inputs] = (48, 32)",
        "TP_MLP: up_proj.bias is (48,), expected None",
        "TP_MLP: up_proj.weight.dtype is torch.float16, expected the dtype of gate_proj, ",
        "TP_MLP: gate_proj.weight.dtype is torch.float8_e4m3fn, expected torch.float16, ",
        "TP_MLP: gate_proj.weight.device is 'meta', expected a tensor with values",
        "TP_MLP: collectives is None, expected a TensorParallel; call _init_ctx(max_M) first",
        "gemm_ar: M is 5, expected at most the context's max_M = 4",
        "gemm: A.dtype is torch.float16, expected the weight's torch.float32",
        "gemm: A.dtype is torch.int8, expected torch.float16, ",
        "gemm: A.device is ",
        "parallelize: module is <class 'torch.nn.modules.linear.Linear'>, expected a module",
        "parallelize: module is <class 'triton_dist.models.llama.SparseMoE'>, expected a module "
        "that contains this layer, which is replaced in its parent. For the layer alone, call ",
        "TP_Attn: heads of q_proj is 3, expected a multiple of the 2 ranks",
        "parallelize: module.config.output_router_logits is True, expected False: the layers",
        "Llama: output_router_logits is True, expected False: the layers",
        "TP_Attn: heads of q_proj is 3, expected a multiple of the 2 ranks",
        "TP_Attn: heads of k_proj is 3, expected a multiple or a divisor of the 2 ranks",
        "KV_Cache: kv_heads is 3, expected a multiple or a divisor of world_size = 2",
        "TP_MoE: experts.1.down_proj.weight.shape is (32, 26), expected (32, 24)",
        "TP_MoE: shared_expert is <class 'triton_dist.models.llama.MLP'>, expected none",
        "TP_Attn: head_dim is 7, expected a divisor of the ",
        "TP_Attn: attention_dropout is 0.5, expected 0.0",
        "TP_Attn: is_causal is False, expected True",
        "TP_Attn: q_norm.weight.shape is (32,), expected a norm per head, [8]",
        "TP_MoE: bias of the gate is 'present', expected no such attribute",
        "TP_MLP: up_proj is <class 'tests.layers.layer_ranks.Adapted'>, expected a torch.nn.Linear",
        "TP_MLP: up_proj is <class 'tests.layers.layer_ranks.Around'>, expected a torch.nn.Linear",
        "parallelize: forward hooks of mlp.down_proj is 'present', expected no hooks: the ",
        "TP_Attn: mask is <class 'torch.Tensor'>, expected a mask as attention_mask and one cache",
        "TP_Attn: past is <class 'tests.layers.layer_ranks.DynamicCache'>, expected a mask as",
    )
    told = "TP_Attn: with 1 key-value heads for 2 ranks, 2 ranks replicate each head"
    for rank, seen in enumerate(on_two_ranks(layer_ranks.mistakes)):
        for message, start in zip(seen, (*starts, told)[: len(starts) + (rank == 0)], strict=True):
            assert message.startswith(start)
