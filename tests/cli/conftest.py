"""Commands of the package, run in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from triton_dist.cli.main import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Status, standard output and standard error of a command."""

    def of(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(arguments)
        return status, *capsys.readouterr()

    return of
