"""Hugging Face models that ``parallelize`` distributes, compared with one process.

``make stress`` runs these tests if transformers is installed.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

from triton_dist.errors import TritonDistWarning
from triton_dist.layers.nvidia import parallelize, sum_gradients

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama ": {"num_key_value_heads": 1},
    "Qwen2": {},  # biases
    "Qwen3": {"head_dim": 8},  # norms of heads
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "norm_topk_prob": True, **EXPERTS},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
    "DeepseekV3": {
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4, **EXPERTS,
    },
}  # fmt: skip


def like_the_stock_model(name: str) -> list[str]:
    """Logits, with padding too, gradients and generated tokens. Returns the layers' names."""
    import transformers

    kind, config_kind = (
        getattr(transformers, name.strip() + rest) for rest in ("ForCausalLM", "Config")
    )
    config = config_kind(**{**SIZES, **MODELS[name]}, attn_implementation="sdpa")

    def made() -> Any:
        torch.manual_seed(0)
        return kind(config).eval()

    whole, shared = made(), made()
    ids = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(1))
    padded = torch.ones_like(ids)
    padded[0, :3] = 0

    def all_of(model: Any) -> list[torch.Tensor]:
        output = model(ids, labels=ids)
        output.loss.backward()
        sum_gradients(model)
        grad = model.model.embed_tokens.weight.grad
        masked = model(ids, attention_mask=padded).logits[padded.bool()]
        tokens = model.generate(ids, attention_mask=padded, max_new_tokens=4, do_sample=False)
        return [output.loss, output.logits, grad, masked, tokens]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TritonDistWarning)
        ranks = parallelize(shared, max_M=16, expert_parallel=name == "DeepseekV3")
    for one, other in zip(all_of(shared), all_of(whole), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    ranks.finalize()
    block = shared.model.layers[-1]
    return [type(block.self_attn).__name__, type(block.mlp).__name__]


pytestmark = [
    pytest.mark.stress,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers"
    ),
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_shared_out(on_two_ranks, name):
    layers = ["TP_Attn", "TP_MoE" if name in ("Qwen3Moe", "Mixtral") else "TP_MLP"]
    if name == "DeepseekV3":
        layers = ["DeepseekV3Attention", "EP_MoE"]
    assert on_two_ranks(like_the_stock_model, name) == [layers] * 2
