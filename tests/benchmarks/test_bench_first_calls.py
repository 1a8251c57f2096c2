"""What first calls at new sizes take."""

from __future__ import annotations

import json

from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs

SCRIPT = str(ROOT / "benchmarks" / "bench_first_calls.py")


def test_sizes_beside_tuned_ones_are_predicted_then_raced(spawn_ranks, tmp_path):
    path = tmp_path / "first.json"
    command = (SCRIPT, "--op", "gemm_rs", "--sizes", "4", "--most", "40", "--json", str(path))
    few = (run_with_few_configs, ("gemm_rs",))
    printed, _ = spawn_ranks(2, *few, *command, init=False, timeout=200)
    assert "gemm_rs, llama-70b-gate-up: 2 ranks" in printed
    calls = json.loads(path.read_text())["calls"]
    frozen, raced = ([each for each in calls if each["frozen"] is kind] for kind in (True, False))
    assert [each["M"] for each in frozen] == [each["M"] for each in raced] != []
    for each in frozen:
        assert each["how"].startswith("predicted from M=")
        assert "device" not in each
    for each in raced:
        assert each["how"].startswith("warm-started from M=")
        assert each["device"] > 0
        assert each["host"] > 0
    assert f"frozen, predicted: {len(frozen)} sizes, host " in printed
    assert f"warm-started: {len(raced)} sizes, host " in printed
