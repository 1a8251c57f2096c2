"""Tuning for the layers of models, up to the file that is shipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytestmark = pytest.mark.timeout(180)


def test_layers_are_tuned_once_and_packed(tmp_path):
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = kept | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]),
        "TRITON_DIST_CACHE_DIR": str(tmp_path / "cache"),
        "TRITON_DIST_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def run(*command):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=150, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    script = str(ROOT / "benchmarks" / "tune_layers.py")
    command = ("bash", str(ROOT / "scripts" / "launch.sh"), script, "--op", "gemm_rs")
    options = ("--layers", "Mistral-7B", "--M", "2048,1024")
    first, second = run(*command, *options), run(*command, *options)
    assert first.count("tuned now") == 2
    assert second.count("from the cache") == 2
    out = tmp_path / "gemm_rs.cpu.json"
    run(sys.executable, "-m", "triton_dist", "pack", "gemm_rs", "--out", str(out))
    keys = [each["key"]["tuple"] for each in json.loads(out.read_text())["groups"][0]["results"]]
    # Rows, N and K of a rank: 2048 x 4096 x 14336, and half the rows, scaled.
    assert sorted(key[:3] for key in keys) == [[1, 8, 14], [2, 8, 14]]
