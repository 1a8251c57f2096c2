"""Pages run as a reader runs them: in an empty home, without variables of triton_dist."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

MATPLOTLIB = Path.home() / ".cache" / "matplotlib"
"""The list of fonts, which takes seconds to make in each home."""


def environment_of_scripts_python(home: Path) -> dict[str, str]:
    """Return the environment of a program that `scripts/python` runs."""
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    shell = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHON": sys.executable}
    ran = subprocess.run(
        ["scripts/python", "-c", program], cwd=ROOT, env=shell, capture_output=True, text=True,
        timeout=100, check=True,
    )  # fmt: skip
    return json.loads(ran.stdout)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("TRITON_DIST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MPLCONFIGDIR", str(MATPLOTLIB))
