"""Hugging Face's models, shared out in one line. CI has no transformers; with them:
``pip install transformers``."""

from __future__ import annotations

import importlib.util

import pytest

from tests.layers import hugging_face_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@pytest.mark.parametrize("name", hugging_face_ranks.MODELS)
def test_a_model_that_is_shared_out(on_two_ranks, name):
    layers = ["TP_Attn", "TP_MoE" if name in ("Qwen3Moe", "Mixtral") else "TP_MLP"]
    assert on_two_ranks(hugging_face_ranks.like_the_stock_model, name) == [layers] * 2
