"""Tuning for the layers of models, up to the file that is shipped."""

from __future__ import annotations

import json

from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs
from triton_dist._archive import Pack
from triton_dist._tuning.store.packs import records_of
from triton_dist.cli.main import main


def test_layers_are_tuned_once_and_packed(spawn_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "cache"))
    script = str(ROOT / "benchmarks" / "tune_layers.py")
    command = (script, "--op", "gemm_rs", "--layers", "Mistral-7B", "--M", "2048,1024")
    for said, options in (("tuned now", []), ("from the cache", ["--run"])):
        few = (run_with_few_configs, ("gemm_rs",))
        printed, _ = spawn_ranks(2, *few, *command, *options, init=False, timeout=200)
        assert printed.count(said) == 2
    out = tmp_path / "gemm_rs.tdpack"
    assert main(["pack", "gemm_rs", "--out", str(out)]) == 0
    keys = [json.loads(record.key.text)["tuple"] for record in records_of(Pack(out))]
    # M, N and K of a rank: 2048 x 4096 x 14336, and half the rows, scaled.
    assert sorted(key[0]["items"][:3] for key in keys) == [[2, 8, 14], [4, 8, 14]]
