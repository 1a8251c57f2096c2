"""A host that has nothing: no cache, no C compiler, no permission to compile or to tune."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
PROGRAM = [sys.executable, str(Path(__file__).with_name("packs_program.py"))]
OPS = ("ag_gemm", "matmul", "scaled")
UNWANTED = ("TRITON_INTERPRET", "TRITON_DIST_DEVICE", "CC", "TRITON_DIST_RECORD_KERNELS")


def run(command: list[str], **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    paths = {"PYTHONPATH": f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, env=kept | paths | variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read(said: str) -> dict[str, dict[str, float]]:
    (line,) = [line for line in said.splitlines() if line.startswith('{"ag_gemm"')]
    return json.loads(line)


def show(what: str, ops: dict[str, dict[str, float]]) -> None:
    for name, facts in ops.items():
        texts = [f"{fact} {number:.4g}" for fact, number in facts.items()]
        print(f"{what}, {name}: {', '.join(texts)}", flush=True)


def test_first_results_compile_and_tune_nothing(tmp_path):
    """Times in milliseconds and numbers of kernels are printed."""
    own = {"TRITON_DIST_CACHE_DIR": str(tmp_path / "own")}
    show("tuning", read(run(PROGRAM, TRITON_CACHE_DIR=str(tmp_path / "tuned"), **own)))

    pack = tmp_path / "elsewhere" / "packs" / "model.tdpack"
    command = ["pack", *OPS, "--kernels", "--out", str(pack), "--", *PROGRAM]
    cold = {"TRITON_CACHE_DIR": str(tmp_path / "cold")}
    said = run([sys.executable, "-m", "triton_dist", *command], **cold, **own)
    without = read(said)
    show("without the pack", without)
    print(said[said.index(f"{pack}: ") :], flush=True)

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    elsewhere = {
        "TRITON_DIST_CACHE_DIR": str(tmp_path / "elsewhere"),
        "TRITON_CACHE_DIR": str(nothing / "triton"),
        "HOME": str(nothing),
        "PATH": str(nothing),
        "TRITON_DIST_COMPILE_FROZEN": "1",
        "TRITON_DIST_AUTOTUNE_FROZEN": "1",
    }
    there = read(run(PROGRAM, **elsewhere))
    show("with the pack", there)
    for name, facts in there.items():
        assert facts["is_right"], name
        assert facts["tunings"] == 0, name
        assert facts.get("compiled", 0) == 0, name
    assert sum(facts.get("compiled", 0) for facts in without.values()) >= 2
    assert sum(facts.get("found", 0) for facts in there.values()) >= 2
