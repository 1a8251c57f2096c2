"""One rule decides whether kernels are interpreted, whichever way a program is started."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from tests.architecture.source import ROOT
from triton_dist.cli.main import main
from triton_dist.runtime.device import interprets_kernels
from triton_dist.testing.rank_pool import _environment

# TRITON_DIST_DEVICE, TRITON_INTERPRET, GPUs of the host, whether kernels are interpreted
RULE = [
    ("auto", "", 0, True),
    ("auto", "", 2, False),
    ("auto", "0", 0, False),
    ("auto", "0", 2, False),
    ("auto", "1", 0, True),
    ("auto", "1", 2, True),
    ("cpu", "", 0, True),
    ("cpu", "", 2, True),
    ("cpu", "0", 2, False),
    ("cpu", "1", 2, True),
    ("cuda", "", 2, False),
    ("cuda", "0", 2, False),
    ("cuda", "1", 2, False),
]


@pytest.fixture(params=RULE, ids=str)
def case(request, monkeypatch):
    device, interpret, gpus, _ = request.param
    monkeypatch.setenv("TRITON_DIST_DEVICE", device)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    return request.param


def test_scripts(case, tmp_path: Path) -> None:
    device, interpret, gpus, interpreted = case
    listed = "; ".join(f"echo GPU {i}:" for i in range(gpus)) or "exit 1"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{listed}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", ". scripts/setup_env.sh; choose_device; export_settings; env"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "TRITON_DIST_DEVICE": device,
            "TRITON_INTERPRET": interpret,
        },
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ("TRITON_INTERPRET=1\n" in ran.stdout) == interpreted
    on_cpu = device == "cpu" or (device == "auto" and (interpret == "1" or not gpus))
    assert ("TRITON_DIST_DEVICE=cpu\n" in ran.stdout) == on_cpu


def test_the_command(case, monkeypatch, capsys, tmp_path: Path) -> None:
    """``env`` prints the result; what imports kernels, here or in a command, is started so."""
    *_, interpreted = case
    assert interprets_kernels()[0] == interpreted
    seen = []

    def run(command, env=None):
        seen.append(env)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(subprocess, "run", run)
    main(["profile", "--out", str(tmp_path / "out.gz"), "--", "program"])
    main(["dump", "--to", str(tmp_path), "--", "program"])
    profiled, dumped = (each["TRITON_INTERPRET"] for each in seen)
    assert (profiled == "1") == interpreted
    assert dumped == (case[1] or "0")


def test_spawned_ranks(case) -> None:
    _, interpret, _, _ = case
    given = {device: _environment(1, 1, device) for device in ("cpu", "cuda")}
    assert given["cpu"]["TRITON_INTERPRET"] == (interpret or "1")
    assert "TRITON_INTERPRET" not in given["cuda"]
