"""Tests that compile kernels without a GPU. They need a process of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import interpreting

HERE = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    """Who asks for these tests gets them, or an error.

    Triton decides at decoration, and a kernel that was decorated to be interpreted cannot be
    compiled. In a run of the whole suite, which interprets, they are listed as skipped (see
    ``tests/conftest.py``).
    """
    asked = [Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args]
    if interpreting() and any(p.resolve().is_relative_to(HERE) for p in asked):
        raise pytest.UsageError(
            "tests/compile compiles kernels, but TRITON_INTERPRET is set: they would be "
            "interpreted. Run it alone: env -u TRITON_INTERPRET python -m pytest tests/compile"
        )


@pytest.fixture(scope="session", autouse=True)
def _own_triton_cache(tmp_path_factory):
    """Compile anew in each run: a cached kernel would hide what this Triton makes of the source.
    Workers of pytest-xdist share the folder, so that each kernel is compiled once."""
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(shared / "triton_cache"))
        yield


@pytest.fixture
def sm90():
    """The compile-only driver for H100 and H200."""
    from triton_dist.testing.compile_only import compile_only

    with compile_only(90) as driver:
        yield driver
