"""Writers that are killed at any moment lose nothing that was committed, and break no file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

QUICK, FULL = 20, 2000


def run(folder: Path, kills: int) -> dict[str, object]:
    """In a process of its own, that has no threads and forks quickly."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.writers", str(folder), str(kills), "7"],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report: dict[str, object] = json.loads(done.stdout)
    print(report)  # `make stress` shows it
    return report


@pytest.mark.parametrize(
    "kills",
    [QUICK, pytest.param(FULL, marks=[pytest.mark.stress, pytest.mark.timeout(1200)])],
)
def test_no_record_is_lost_or_unreadable_when_writers_are_killed(tmp_path, kills):
    report = run(tmp_path, kills)
    assert report["kills"] >= kills
    assert (report["lost"], report["unreadable"], report["set_aside"]) == ([], [], 0)
    assert report["died_alone"] == 0
    assert report["readers"] == 2
    assert report["reads"] > kills
    assert report["committed"] > 0
    assert report["shared"] > 0
