"""Small benchmarks, on CPU ranks: what they measure, print and write."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict

import pytest
import torch

from benchmarks import bench_host_cost, bench_matmul
from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs
from triton_dist._archive import Pack
from triton_dist._tuning.store.packs import records_of
from triton_dist.cli.main import main


def test_every_part_of_a_call_is_timed(spawn_ranks):
    first, second = spawn_ranks(2, bench_host_cost.measure, 40, 64, 64, 2)
    assert first == second  # the slowest rank's
    assert {"tuned call", "call", "key_fn", "  transfer", "  consumer", "  finish"} <= set(first)
    assert all(value > 0 for value in first.values())
    assert first["key_fn"] < first["call"]


def test_every_contender_is_checked_and_timed(monkeypatch):
    times = bench_matmul.compare((24, 40, 32), rounds=1)
    assert list(times) == ["matmul", "torch.matmul", "triton.autotune"]
    assert min(times.values()) > 0
    assert bench_matmul.first_result("matmul", (24, 40, 32)) > 0
    monkeypatch.setitem(bench_matmul.CANDIDATES, "wrong", lambda A, B: torch.zeros(24, 40).half())
    with pytest.raises(AssertionError):
        bench_matmul.compare((24, 40, 32), rounds=1)


def test_a_start_that_takes_too_long_is_told():
    assert bench_matmul._seconds(["sleep", "5"], {}, 0.05) == "more than 0 s"
    assert bench_matmul._seconds(["false"], {}, 5) == "failed: []"


FIRST_CALLS = str(ROOT / "benchmarks" / "bench_first_calls.py")


@pytest.mark.stress
def test_sizes_beside_tuned_ones_are_predicted_then_raced(spawn_ranks, tmp_path):
    path = tmp_path / "first.json"
    command = (FIRST_CALLS, "--op", "gemm_rs", "--sizes", "1", "--most", "40", "--json", str(path))
    few = (run_with_few_configs, {"gemm_rs": 2})
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


def test_layers_are_tuned_once_and_packed(spawn_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "cache"))
    script = str(ROOT / "benchmarks" / "tune_layers.py")
    command = (script, "--op", "gemm_rs", "--layers", "Mistral-7B", "--M", "2048,1024")
    for said, options in (("tuned now", []), ("from the cache", ["--run"])):
        few = (run_with_few_configs, {"gemm_rs": 2})
        printed, _ = spawn_ranks(2, *few, *command, *options, init=False, timeout=200)
        assert printed.count(said) == 2
    out = tmp_path / "gemm_rs.tdpack"
    assert main(["pack", "gemm_rs", "--out", str(out)]) == 0
    keys = [json.loads(record.key.text)["tuple"] for record in records_of(Pack(out))]
    # M, N and K of a rank: 2048 x 4096 x 14336, and half the rows, scaled.
    assert sorted(key[0]["items"][:3] for key in keys) == [[2, 8, 14], [4, 8, 14]]


def test_the_summary_of_expert_parallelism_names_the_worst_row(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench_ep = importlib.import_module("bench_ep")
    rows = bench_ep.rows_of(
        bench_ep.parse(["--tokens-random", "3", "--routing", "even,zipf", "--scale", "1"])
    )
    assert len(rows) == 6
    assert {row.routing for row in rows} == {"even", "zipf"}
    results = []
    for number, row in enumerate(rows):
        times = {"own": 10.0, bench_ep.ALL_GATHER: 20.0, bench_ep.ALL_TO_ALL: 8.0 + number}
        direction = {"times": times, "best": "own"}
        results.append({"row": asdict(row), "dispatch": direction, "combine": direction})
    lines = list(bench_ep.summary(results))
    assert len(lines) == 4
    assert lines[0].startswith("dispatch, all-gather: worst 2.00 x (")
    assert lines[0].endswith("geometric mean 2.00 x, 0 of 6 below 0.98 x")
    assert lines[3].startswith(f"combine, all-to-all: worst 0.80 x ({rows[0]})")
    assert lines[3].endswith("2 of 6 below 0.98 x")
