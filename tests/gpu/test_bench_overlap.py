"""The benchmark of overlapped ops on GPUs: every peer and every config passes, in both modes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu(count=2)]


def test_nothing_fails(tmp_path):
    unwanted = ("TRITON_INTERPRET", "TRITON_DIST_DEVICE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    path = tmp_path / "overlap.json"
    done = subprocess.run(
        [
            "bash", str(ROOT / "scripts/launch.sh"), "--nproc_per_node=2",
            str(ROOT / "benchmarks/bench_overlap.py"), "--shapes", "1024:4096:2048,96:2048:1024",
            "--rounds", "5", "--json", str(path),
        ],
        env=kept | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for shape in json.loads(path.read_text())["shapes"]:
        assert shape["failures"] == {}
        rows = {(row["name"], row["mode"]) for row in shape["rows"]}
        for name in ("torch async-TP", "all-gather + matmul", "tuned", "tuned, again"):
            assert {(name, "eager"), (name, "graph")} <= rows
        assert all("limit" in summary for summary in shape["modes"].values())
