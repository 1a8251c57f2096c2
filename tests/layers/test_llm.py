"""Whole models: as scripts call them, and tuned ahead of serving."""

from __future__ import annotations

import pytest

from tests.layers import llm_ranks


@pytest.mark.parametrize(("name", "kind"), [("tiny", "dense"), ("tiny-moe", "moe")])
def test_a_model_as_scripts_call_it(on_two_ranks, tmp_path, name, kind):
    assert on_two_ranks(llm_ranks.as_scripts_call_it, tmp_path, name) == [(kind, 8)] * 2


def test_mistakes_are_said(on_two_ranks, tmp_path):
    starts = (
        "LLM: config.rank is 2, expected ",
        "LLM: config.world_size is 3, expected 2, as in the group",
        "LlamaConfig.of: model is 'nobody/none', expected a folder with a config.json, or one of ",
        "LLM.set_fwd: mode is 'fast', expected one of torch, triton_dist, triton_dist_AR, ",
        "TensorParallel: max_M is 0, expected at least 1",
        "TP_Attn: ranks is None, expected a TensorParallel; call ",
        "gemm_ar: M is 6, expected at most the context's max_M = 4",
        "TP_Attn: batch is 2, expected at most the cache's batch_size = 1",
        "LLM.tune: prompts is 9, expected at most max_length = 8",
        "LLM.tune: sequences is 3, expected a multiple of the 2 ranks",
        "init_model_cpu('",
    )
    for seen in on_two_ranks(llm_ranks.mistakes, tmp_path):
        for message, start in zip(seen, starts, strict=True):
            assert message.startswith(start)


def test_serving_starts_frozen(spawn_ranks, tmp_path):
    """What the command has tuned serves a process that must not tune."""
    env = {"TRITON_DIST_CACHE_DIR": str(tmp_path / "cache")}
    tuned = spawn_ranks(2, llm_ranks.tuned_by_the_command, init=False, env=env)
    assert tuned == [[2, 2, 2]] * 2
    env["TRITON_DIST_AUTOTUNE_FROZEN"] = "1"
    assert spawn_ranks(2, llm_ranks.served, init=False, env=env) == [[0, 0, 0]] * 2
