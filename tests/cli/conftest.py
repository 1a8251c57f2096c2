"""Commands of the package, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from triton_dist import _archive
from triton_dist.cli import validator
from triton_dist.cli.main import main


@pytest.fixture(autouse=True)
def _import_tests_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge functions of test modules in this process, which takes no seconds."""
    monkeypatch.setattr(validator, "OWN_PACKAGES", {"triton_dist", "tests"})


@pytest.fixture
def package_records() -> None:
    """Request this fixture in tests that read the records of the package."""


@pytest.fixture(autouse=True)
def _hide_package_records(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hide the records of the package: a command that reads them all takes 0.4 s."""
    if "package_records" not in request.fixturenames:
        monkeypatch.setattr(_archive, "PACKAGE_RECORDS", tmp_path / "no records")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Status, standard output and standard error of a command."""

    def of(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return of
