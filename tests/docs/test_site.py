"""The site: `make site` builds it without warnings, and its search finds all of the API."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from inspect import isclass, isfunction

import pytest

from tests.docs.markdown import ROOT
from tests.docs.test_pages import PUBLIC_MODULES

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("mkdocstrings", reason="needs the extra docs")


def test_the_site_builds_without_warnings_and_its_search_finds_the_api(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    result = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    index = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))
    found = {entry["location"] for entry in index["docs"]}
    assert "api/tune/#triton_dist.tune.autotune" in found
    assert "api/ops/#triton_dist.kernels.nvidia.ag_gemm" in found
    shown = {place.rpartition(".")[2] for place in found if place.startswith("api/")}
    modules = [import_module(module) for module in PUBLIC_MODULES]
    public = [(name, getattr(module, name)) for module in modules for name in module.__all__]
    public = [(name, value) for name, value in public if isfunction(value) or isclass(value)]
    missing = [name for name, value in public if not {name, value.__name__} & shown]
    assert not missing, "add them to docs/api"
    page = (tmp_path / "tutorials" / "1-tune-a-function" / "index.html").read_text("utf-8")
    assert 'class="kn"' in page, "code blocks are highlighted"
