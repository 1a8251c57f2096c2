"""What is made of compute-sanitizer's reports, and of those who have none."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from pathlib import Path

import pytest

from tests.sanitize import run
from triton_dist.debugging import sanitizer as reports

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at kernel_push+0x1a0 in push.py:12
=========     by thread (3,0,0) in block (0,0,0)
=========     Access at 0x7f31c2000010 is out of bounds
=========     Host Frame: main [0x1b2] in python3
=========
========= Invalid __global__ write of size 4 bytes
=========     at kernel_push+0x1a0 in push.py:12
=========     Access at 0x7f31c2000014 is out of bounds
=========
========= ERROR SUMMARY: 2 errors
"""
RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at kernel_sum+0x230 in sum.py:8
=========     and Read access at kernel_sum+0x2c0 in sum.py:9 [24 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
NO_RACES = (
    "========= COMPUTE-SANITIZER\n"
    "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
)
BROKEN_OFF = (
    "========= COMPUTE-SANITIZER\n"
    "========= Error: Target application terminated before first instrumented API call\n"
)


@pytest.mark.parametrize(
    ("text", "count", "kinds"),
    [
        (
            MEMCHECK,
            2,
            {"Invalid __global__ write of size 4 bytes at kernel_push+… in push.py:12": 2},
        ),
        (RACES, 1, {"Error: Race reported between Write access at kernel_sum+… in sum.py:8": 1}),
        (CLEAN, 0, {}),
        (NO_RACES, 0, {}),
        (
            BROKEN_OFF,
            None,
            {"Error: Target application terminated before first instrumented API call": 1},
        ),
        ("", None, {}),
    ],
)
def test_a_report_says_what_was_found_and_whether_it_is_whole(text, count, kinds):
    report = reports.parse_report(text)
    assert (report.count, report.count_by_finding) == (count, kinds)
    assert report.is_clean is (count == 0)


def test_what_several_processes_found_is_a_line_each():
    reports_of = {
        name: reports.parse_report(text)
        for name, text in (
            ("rank-0", MEMCHECK), ("rank-1", RACES), ("rank-2", CLEAN), ("rank-3", BROKEN_OFF),
            ("rank-4", "========= ERROR SUMMARY: 3 errors\n"),
        )
    }  # fmt: skip
    assert reports.merge_reports(reports_of) == [
        "Invalid __global__ write of size 4 bytes at kernel_push+… in push.py:12: 2 x rank-0",
        "Error: Race reported between Write access at kernel_sum+… in sum.py:8: 1 x rank-1",
        "Error: Target application terminated before first instrumented API call: 1 x rank-3",
        "incomplete report: 1 x rank-3",
        "findings in an unknown format: see the report: 3 x rank-4",
    ]


def test_a_rank_is_right_if_it_says_so_and_nothing_was_reported():
    clean, found = reports.parse_report(CLEAN), reports.parse_report(MEMCHECK)
    said = "12 calls are right\n"
    assert run.verdict(0, clean, said) == ""
    assert run.verdict(0, None, said) == ""
    assert "2 x Invalid __global__ write" in run.verdict(reports.FINDINGS_STATUS, found, said)
    assert "incomplete report" in run.verdict(0, reports.parse_report(""), said)
    assert run.verdict(1, clean, "Traceback\nKeyError: 3\n") == "exited with status 1: KeyError: 3"
    assert run.verdict(None, clean, said) == "did not end: 12 calls are right"
    assert run.verdict(None, clean, "") == "did not end"
    assert run.verdict(0, clean, "") == "made no calls"


def program(folder):
    path = folder / "bin" / "compute-sanitizer"
    path.parent.mkdir(parents=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_tool_of_path_comes_before_that_of_cuda(tmp_path):
    on_path, of_cuda = program(tmp_path / "a"), program(tmp_path / "b")
    home = {"CUDA_HOME": str(tmp_path / "b")}
    assert reports.find({"PATH": str(on_path.parent)} | home) == on_path
    assert reports.find({"PATH": ""} | home) == of_cuda


def test_the_tool_of_a_wheel_is_found(tmp_path, monkeypatch):
    path = program(tmp_path)

    class File:
        name = "compute-sanitizer"

        def locate(self):
            return path

    def files(wheel):
        if wheel.endswith("cu12"):
            return [File()]
        raise importlib.metadata.PackageNotFoundError(wheel)

    monkeypatch.setattr(importlib.metadata, "files", files)
    found = reports.find({"PATH": ""})
    assert found in (path, Path("/usr/local/cuda/bin/compute-sanitizer"))
    path.chmod(0o644)  # cannot be run
    assert reports.find({"PATH": ""}) != path


def test_without_the_tool_it_is_said_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(reports, "find", lambda: None)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert run.main() == 2
    assert "pip install nvidia-cuda-sanitizer-api" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--tools", "synccheck"], ["gemm"]])
def test_what_is_unknown_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 2
    assert f"{arguments[-1]!r}: expected tools of" in capsys.readouterr().err


@pytest.mark.stress
def test_a_run_without_a_tool_is_right(tmp_path, capsys):
    op = "all_gather"
    options = argparse.Namespace(device="cpu", ranks=1, seconds=60.0, logs=tmp_path)
    assert run._sanitized(op, [], tmp_path / "compute-sanitizer", options) == 0
    assert re.fullmatch(rf"{op} +no tool +right +[\d.]+ s\n", capsys.readouterr().out)
    for output in tmp_path.glob("*.out"):
        done = output.read_text().count("done: ")
        assert f"{done} calls are right" in output.read_text()


def test_ops_are_those_that_a_rank_knows():
    from tests.sanitize import rank

    assert tuple(rank.OPS) == run.OPS
