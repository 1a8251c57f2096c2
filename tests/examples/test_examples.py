"""The programs in ``examples/`` run; those for ranks on 2 CPU ranks.

On CPU ranks ``tests/distributed/test_model_step.py`` runs ``model_step``, and goes on from there.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.docs.run_blocks import run_program

EXAMPLES = ROOT / "examples"
# Ranks, and lines that rank 0 prints among others.
PROGRAMS = {
    "tune_a_function": (
        1,
        ["tuning 5 configs (0 pruned)", "1000 tokens on {device}: {{'blocks': "],
    ),
    "ag_gemm_layer": (2, ["step 0: ", " tokens per rank -> y (", "step 2: "]),
    "wait_for_a_peer": (2, ["rank 0 received the data of rank 1"]),
    "train_llama": (2, ["step 3: loss ", ", on one rank "]),
    "train_llama --sp 2 --dtype bfloat16": (2, ["step 3: loss ", ", on one rank "]),
    "save_and_resume": (4, ["the resumed loss is equal; the stock model has 12 weights"]),
    "serve_llama": (2, [" sequences, as on one rank: [["]),
    "serve_llama --kv-shards": (2, [" sequences, as on one rank: [["]),
    "serve_llama --fp8": (2, [" sequences, logits at most 0."]),
    "serve_llama --model tiny-moe --fp8 block": (2, [" sequences, logits at most 0."]),
    "model_folder": (1, [": 1 layers of tiny, "]),
    # Where optuna is not installed, as in CI, it says so: the search is tested in
    # tests/tuning/test_big_spaces.py with one that needs no library.
    "own_search": (1, ["optuna "]),
    "model_step": (2, ["step 2: loss ", "2 ranks agree on "]),
}

ONLY_ON_GPUS = (
    "model_step", "serve_llama --kv-shards", "serve_llama --fp8",
    "serve_llama --model tiny-moe --fp8 block",
    "train_llama --sp 2 --dtype bfloat16",
)  # fmt: skip
"""Programs that take too long for CPU ranks."""


def run(name, spawn_ranks, device):
    ranks, lines = PROGRAMS[name]
    program, *arguments = name.split()
    path = str(EXAMPLES / f"{program}.py")
    # Tuning takes long. Tests of tutorial 3 tune the op of ag_gemm_layer.
    is_tuned = name in ("tune_a_function", "own_search", "model_step")
    env = {} if is_tuned else {"TRITON_DIST_AUTOTUNE": "0"}
    printed = spawn_ranks(ranks, run_program, path, *arguments, init=False, device=device, env=env)
    for line in lines:
        assert line.format(device=device) in printed[0]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ONLY_ON_GPUS])
def test_example_runs(name, spawn_ranks):
    run(name, spawn_ranks, "cpu")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu(count=max(2, PROGRAMS[name][0])))
        for name in PROGRAMS
    ],
)
def test_example_runs_on_gpus(name, spawn_ranks):
    run(name, spawn_ranks, "cuda")


def test_a_sharded_cache_stores_replicated_heads_once(monkeypatch):
    """Ranks 0 and 1 have key-value head 0, ranks 2 and 3 head 1."""
    spec = importlib.util.spec_from_file_location("serve_llama", EXAMPLES / "serve_llama.py")
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    heads = torch.randn(2, 1, 8, 1, 4)
    ranks = SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 4)
    monkeypatch.setattr(serve, "dist", ranks)
    monkeypatch.setattr(serve, "create_sp_decode_context", lambda *_, **__: None)
    monkeypatch.setattr(serve, "all_gather_rows", lambda _: heads.repeat_interleave(2, 0))
    config = SimpleNamespace(
        num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_hidden_layers=1
    )
    cache = serve.ShardedCache(config, 1, 8, torch.float32, "cpu")
    cache.attend(0, heads[0], heads[0], heads[0])
    expected = heads[:, 0, [1, 5], 0].transpose(0, 1)
    for stored in (cache.k, cache.v):
        assert torch.equal(stored[0, 0, :2], expected)


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {name.split()[0] for name in PROGRAMS}
