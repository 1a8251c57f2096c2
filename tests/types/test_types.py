"""basedpyright accepts the right calls of calls.py and reports the wrong ones, as mypy must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_basedpyright(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright", reason="basedpyright, which needs Node, is not installed")
    config = {
        "include": [str(Path(__file__).with_name("calls.py"))],
        "typeCheckingMode": "standard",
        "enableTypeIgnoreComments": False,  # these are for mypy
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    checked = subprocess.run(
        [*command, "--project", str(tmp_path / "config.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
