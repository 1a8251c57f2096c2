"""A wheel has the files of the tree."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

import triton_dist
from tests.architecture.source import ROOT


def files_of_wheel(tree: Path) -> set[str]:
    """Build a wheel in ``tree``, as pip does, and return the package's files in it."""
    program = "import setuptools.build_meta as backend; print(backend.build_wheel('dist'))"
    built = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, timeout=100,
        check=True,
    )  # fmt: skip
    name = built.stdout.splitlines()[-1]
    assert name.startswith(f"triton_dist_tuner-{triton_dist.__version__}-")
    with zipfile.ZipFile(tree / "dist" / name) as wheel:
        return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_a_removed_module_is_not_in_the_next_wheel(tmp_path: Path) -> None:
    installed = [each.version for each in importlib.metadata.distributions(name="setuptools")]
    if not installed or Version(installed[0]) < Version("77"):
        pytest.skip("needs setuptools 77, which the build asks for")
    tracked = subprocess.run(
        ["git", "ls-files", "python", "setup.py", "pyproject.toml", "README.md", "LICENSE"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    package = {name.removeprefix("python/") for name in tracked if name.startswith("python/")}
    module = "triton_dist/ghost.py"
    (tmp_path / "python" / module).write_text("")
    assert files_of_wheel(tmp_path) == package | {module}
    (tmp_path / "python" / module).unlink()
    assert files_of_wheel(tmp_path) == package


def test_the_citation_has_the_version_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {triton_dist.__version__}\n" in citation
