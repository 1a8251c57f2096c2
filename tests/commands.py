"""Commands as a user types them, run by tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.architecture.source import ROOT

_OF_THE_TEST = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TRITON_INTERPRET", "PYTHONPATH",
)  # fmt: skip


def run(
    *command: str, cwd: Path | None = None, timeout: float = 150, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A command on this Python and on CPU ranks, with ``variables`` in its environment."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_THE_TEST}
    environment = kept | {
        "PYTHON": sys.executable,
        "TRITON_DIST_DEVICE": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(
        command, env=environment | variables, cwd=cwd, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip


def launch(
    *arguments: str, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """``scripts/launch.sh`` with ``arguments``."""
    return run("bash", str(ROOT / "scripts" / "launch.sh"), *arguments, cwd=cwd, **variables)


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """This Python with the package on its path."""
    path = os.pathsep.join([str(ROOT / "python"), *filter(None, sys.path)])
    return run(sys.executable, *arguments, **({"PYTHONPATH": path} | variables))
