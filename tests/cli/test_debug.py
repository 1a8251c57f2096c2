"""``triton-dist debug``."""

from __future__ import annotations

import os
import sys

import pytest

from triton_dist.cli.main import main
from triton_dist.debugging import sanitizer

SHOW = "import os; print(*(os.environ.get('TRITON_' + name) for name in {}))"
KERNEL = """
import torch, triton.language as tl, triton_dist

@triton_dist.jit
def kernel_fill(x):
    tl.store(x + tl.arange(0, 16), 1.0)

kernel_fill[(1,)](torch.zeros(32)[:15])
"""


def test_a_mode_is_on_in_the_command(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(KERNEL)
    assert main(["debug", "interp:bounds", "--", sys.executable, str(script)]) == 1
    said = capfd.readouterr().err
    assert said.count("triton_dist: rank 0: debugging with interp:bounds\n") == 1
    assert (
        f"OutOfBounds: rank 0, program (0, 0, 0) of kernel_fill, {script}:6: store outside" in said
    )


def test_the_command_gets_what_the_mode_needs(capfd):
    show = SHOW.format(["INTERPRET", "DIST_DEVICE", "DIST_DEBUG"])
    assert main(["debug", "interp,assert", "--", sys.executable, "-c", show]) == 0
    assert capfd.readouterr().out == "1 cpu interp,assert\n"


def a_tool(folder, monkeypatch, more=""):
    """A compute-sanitizer that finds something, on PATH."""
    tool = folder / "compute-sanitizer"
    found = "Invalid write\\n=========     at kernel_a in a.py:3\\n=========\\n"
    tool.write_text(
        "#!/usr/bin/env bash\n"
        "while [[ $1 == --* ]]; do case $1 in --log-file) log=$2 ;; esac; shift 2; done\n"
        f'printf "========= {found}========= ERROR SUMMARY: 2 errors\\n" >"${{log/\\%p/1}}"\n'
        f'{more}exec "$@"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_tool_runs_around_the_command_and_its_reports_are_merged(tmp_path, monkeypatch, capfd):
    a_tool(
        tmp_path, monkeypatch, 'printf "========= ERROR SUMMARY: 0 errors\\n" >"${log/\\%p/2}"\n'
    )
    reports = tmp_path / "reports"
    show = SHOW.format(["DIST_DEBUG", "DIST_DEBUG_TOOL", "DIST_AUTOTUNE_TIMEOUT"])
    command = [sys.executable, "-c", show]
    assert main(["debug", "memcheck", "--reports", str(reports), "--", *command]) == 0
    shown = capfd.readouterr().out
    assert "memcheck memcheck 3000.0\n" in shown
    assert (
        f"memcheck: 2 reports in {reports}\n  Invalid write at kernel_a in a.py:3: 1 x process-1\n"
        in shown
    )


def test_a_command_that_no_tool_saw_is_no_success(tmp_path, monkeypatch, capfd):
    a_tool(tmp_path, monkeypatch)
    script = tmp_path / "torchrun"  # one that does not start what PYTHON_EXEC says
    script.write_text("#!/bin/sh\necho ran\n")
    script.chmod(0o755)
    assert main(["debug", "memcheck", "--", str(script)]) == 1
    shown = capfd.readouterr()
    assert "ran\n" in shown.out
    assert "memcheck: no process of the command ran under the tool\n" in shown.err


@pytest.mark.stress
def test_ranks_that_torchrun_starts_have_a_report_each(tmp_path, monkeypatch, capfd):
    a_tool(tmp_path, monkeypatch)
    reports, script = tmp_path / "the reports", tmp_path / "script.py"
    script.write_text("import os; print('rank', os.environ['RANK'], flush=True)")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(script)]
    assert main(["debug", "memcheck", "--reports", str(reports), "--", *command]) == 0
    shown = capfd.readouterr().out
    assert sorted(line for line in shown.splitlines() if line.startswith("rank ")) == [
        "rank 0", "rank 1",
    ]  # fmt: skip
    assert {path.name for path in reports.glob("*.log")} == {"rank-0.log", "rank-1.log"}
    assert "  Invalid write at kernel_a in a.py:3: 1 x rank-0, 1 x rank-1\n" in shown


def test_a_mode_that_would_find_nothing_is_refused_before_the_command(capfd, monkeypatch):
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    for mode, said in {
        "luck": "no such mode",
        "gsan": "Use instead: TRITON_INTERPRET=1",
        "memcheck": "pip install nvidia-cuda-sanitizer-api",
        "interp,gsan": "kernels are interpreted",
    }.items():
        assert main(["debug", mode, "--", "false"]) == 2
        assert said in capfd.readouterr().err
