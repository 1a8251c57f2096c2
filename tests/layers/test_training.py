"""Training with data parallelism, gradient norms and checkpoints, compared with one process."""

from __future__ import annotations

import functools

import pytest

from tests.layers import training_ranks
from tests.layers.conftest import FIRST_CONFIG


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("fsdp2", 1), id="fsdp2, replicated kv head"),
        pytest.param(
            ("fsdp2", 2, 4, True), id="fsdp2, experts, sequence-parallel", marks=pytest.mark.stress
        ),
        pytest.param(("ddp", 1), id="ddp", marks=pytest.mark.stress),
    ],
)
def test_a_mesh_trains_like_one_process(on_four_ranks, arguments):
    for difference in on_four_ranks(training_ranks.trained_like_one_process, *arguments):
        assert max(difference) < 2e-5


def test_an_expert_parallel_mesh_trains_like_one_process(on_two_ranks):
    options = {"expert_parallel": True, "steps": 1, "shape": (1, 2)}
    run = functools.partial(training_ranks.trained_like_one_process, **options)
    for difference in on_two_ranks(run, "fsdp2", 2, 4, True):
        assert max(difference) < 2e-5


def test_torch_clips_like_us(on_two_ranks):
    for warned, nonfinite in on_two_ranks(training_ranks.torch_clips_like_us):
        assert "triton_dist.layers.nvidia.clip_grad_norm_ was called instead" in warned
        assert "norm of order 2.0 of the gradients is nan" in nonfinite


def test_an_infinity_in_one_shard_skips_the_step_on_all_ranks(on_two_ranks):
    assert on_two_ranks(training_ranks.an_infinity_in_one_shard) == [[True, True]] * 2


@pytest.mark.parametrize("num_experts", [pytest.param(0, marks=pytest.mark.stress), 4])
def test_training_resumes_on_another_number_of_ranks(on_four_ranks, tmp_path, num_experts):
    for differences in on_four_ranks(training_ranks.resharded, str(tmp_path), num_experts):
        assert len(differences) == 3
        assert max(differences) < 1e-3


def test_wrong_state_dicts(on_two_ranks, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    for rank, texts in enumerate(on_two_ranks(training_ranks.wrong_state_dicts, str(tmp_path))):
        pickled, others, raw, missing, unknown, shape, tiny, dim, partial, *states = texts
        assert "Save the model's state_dict() instead of the model" in pickled
        assert f"of the shard of {name} is [{1 - rank}, 2, 1], expected [{rank}, 2, 1]" in others
        assert "gate_up_proj is the shard of one rank; expected the stock module" in raw
        assert 'Missing key(s) in state_dict: "model.layers.0.mlp.down_proj.weight"' in missing
        assert 'Unexpected key(s) in state_dict: "model.layers.0.mlp.bias"' in unknown
        assert f"{name}.shape is (32, 46), expected (32, 48)" in shape
        assert f"{name}.shape is (32, 1), expected (32, 48)" in tiny
        assert f"of the shard of {name} is [{rank}, 2, 0], expected [{rank}, 2, 1]" in dim
        assert 'Missing key(s) in state_dict: "model.layers.0.mlp.gate_proj.weight"' in partial
        assert "Unexpected" not in partial
        lost = "optimizer's {} is None, expected the state of an equal optimiser. TrainingState("
        assert lost.format("param_groups[0]") in states[0]
        assert lost.format("state of model.layers.0.self_attn.q_proj.weight, step") in states[1]
        assert (
            "optimizer's state of model.layers.0.mlp.down_proj.shape is (3,), expected" in states[2]
        )


def test_any_number_of_tokens(spawn_ranks):
    env = {
        **FIRST_CONFIG,
        "TRITON_DIST_AUTOTUNE_TIMEOUT": "4",
        "TRITON_DIST_WAIT_TIMEOUT": "4",
    }
    errors = spawn_ranks(2, training_ranks.any_number_of_tokens, env=env)
    assert errors[0].startswith("WaitTimeout: rank 0")
    assert "RankTimeout: rank 1: a call without tokens, which all ranks must make" in errors[1]


def test_inputs_that_differ(spawn_ranks):
    env = {**FIRST_CONFIG, "TRITON_DIST_DEBUG": "agree"}
    for values, shape in spawn_ranks(2, training_ranks.inputs_that_differ, env=env):
        assert "the input of a call of TP_Attn" in values
        assert "input (2, 6, 32), digest" in values
        assert "input (2, 5, 32), digest" in shape
