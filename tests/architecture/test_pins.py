"""The versions that set-up installs, resolved against the package index: by metadata alone, which
installs nothing, and without the wheels that this machine may have."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.architecture.source import ROOT
from triton_dist.runtime.triton_compat import SUPPORTED

CONSTRAINTS = ROOT / "constraints"
PAIRS = {path.stem.removeprefix("triton-"): path for path in CONSTRAINTS.glob("triton-*.txt")}
LOWEST_PYTHON = {"3.9.0": "3.11"}  # has no wheel for 3.10
NO_SOLUTION = 1  # uv's status; another one says that it could not find out


def resolve(pair: Path, python: str) -> subprocess.CompletedProcess[str]:
    """What set-up asks pip for, asked of uv for every Python from ``python`` on."""
    uv = pytest.importorskip("uv", reason="needs uv, of the extra `pins`")
    command = [
        uv.find_uv_bin(), "pip", "compile", "pyproject.toml", "--extra=dev", "--extra=bench",
        f"--constraint={CONSTRAINTS / 'tested.txt'}", f"--constraint={pair}",
        "--universal", f"--python-version={python}", "--only-binary=:all:", "--quiet",
        "--no-header", "--no-annotate", "--no-config", "--system-certs",
        "--no-python-downloads", f"--python={sys.executable}",
    ]  # fmt: skip
    return subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, timeout=200, check=False
    )


@pytest.mark.stress
def test_every_set_of_versions_can_be_installed(tmp_path: Path) -> None:
    """And one that cannot is noticed: torch's build of the index demands a Triton of its own."""
    impossible = tmp_path / "impossible.txt"
    impossible.write_text("torch==2.13.0\ntriton==3.9.0\n")
    lowest = [LOWEST_PYTHON.get(version, "3.10") for version in PAIRS]
    with ThreadPoolExecutor() as threads:
        *results, refused = threads.map(resolve, [*PAIRS.values(), impossible], [*lowest, "3.10"])
    for result in (*results, refused):
        if result.returncode not in (0, NO_SOLUTION):
            pytest.skip(f"no package index answers: {result.stderr.strip().splitlines()[0]}")
    assert refused.returncode == NO_SOLUTION
    assert "torch==2.13.0 depends on triton" in refused.stderr
    for version, result in zip(PAIRS, results, strict=True):
        assert result.returncode == 0, result.stderr
        assert f"triton=={version}" in result.stdout


def test_every_supported_triton_has_a_set_of_versions() -> None:
    minors = {tuple(map(int, version.split(".")[:2])) for version in PAIRS}
    assert all(version in SpecifierSet(SUPPORTED["triton"]) for version in PAIRS)
    assert minors == {(3, minor) for minor in range(6, 10)}
    page = (ROOT / "docs" / "reference" / "supported-versions.md").read_text(encoding="utf-8")
    assert [version for version in PAIRS if version not in page] == []


def test_what_is_needed_is_said_once() -> None:
    """pip and the check at first use ask for the same versions."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{package}{versions}"' in text for package, versions in SUPPORTED.items())
