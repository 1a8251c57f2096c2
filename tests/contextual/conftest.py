from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the step logs; not the one that the tests were started in."""
    folder = tmp_path / "logs"
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_LOG_DIR", str(folder))
    return folder
