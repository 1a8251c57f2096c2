"""What is supported, what is installed, which way a kernel will run."""

from __future__ import annotations

import pytest
import torch
import triton

from triton_dist import knobs
from triton_dist.errors import UnsupportedVersion
from triton_dist.runtime import triton_compat


@pytest.fixture(autouse=True)
def _forget_cached_versions():
    triton_compat.check_versions.cache_clear()
    triton_compat.triton_version.cache_clear()
    yield
    triton_compat.check_versions.cache_clear()
    triton_compat.triton_version.cache_clear()


@pytest.mark.parametrize(
    ("module", "version"),
    [
        (torch, torch.__version__), (torch, "2.9.0"), (torch, "2.11.0a0+git1234567"),
        (torch, "2.13.0+cpu"), (torch, "2.9.1+cu130"), (torch, "3.0.0"), (triton, "3.6.0"),
        (triton, "3.6.1"), (triton, "3.9.9"), (triton, "3.7.0+git0123abcd"),
    ],
)  # fmt: skip
def test_supported_versions(monkeypatch, module, version):
    monkeypatch.setattr(module, "__version__", version)
    triton_compat.check_versions()


@pytest.mark.parametrize(
    ("package", "module", "version"),
    [
        ("torch", torch, "2.8.1"),
        ("torch", torch, "1.13.1+cu117"),
        ("triton", triton, "3.10.0"),
        ("triton", triton, "3.10.0+git0123abcd"),
    ],
)
def test_an_unsupported_version_names_what_is_installed_and_what_to_install(
    monkeypatch, package, module, version
):
    monkeypatch.setattr(module, "__version__", version)
    with pytest.raises(UnsupportedVersion) as error:
        triton_compat.check_versions()
    message = str(error.value)
    assert f"{package} {version} is installed" in message
    assert f"pip install '{package}{triton_compat.SUPPORTED[package]}'" in message


def test_a_triton_that_is_too_old_is_replaced_by_a_newer_torch(monkeypatch):
    """It came with torch, whose build for GPUs demands it."""
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    with pytest.raises(UnsupportedVersion, match=r"triton 3\.5\.1 is installed") as error:
        triton_compat.check_versions()
    assert str(error.value).endswith("pip install 'torch>=2.10'")


def test_software_versions_name_everything_that_can_change_code():
    versions = triton_compat.software_versions()
    assert set(versions) == {"torch", "triton", "cuda", "triton_dist"}
    assert versions["torch"] == torch.__version__
    assert versions["triton"] == triton.__version__
    assert versions["cuda"] == (torch.version.cuda or "none")
    assert all(isinstance(value, str) and value for value in versions.values())


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_is_interpreting_follows_tritons_own_switch(monkeypatch, value, expected):
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert triton_compat.is_interpreting() is expected


def test_pinned_defaults_leave_the_users_choice(monkeypatch):
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    monkeypatch.setattr(knobs, "put", monkeypatch.setenv)  # undone after the test
    triton_compat.pin_defaults()
    assert triton.knobs.language.default_fp_fusion is True
    assert knobs.is_set("TRITON_DEFAULT_FP_FUSION")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    triton_compat.pin_defaults()
    assert triton.knobs.language.default_fp_fusion is False
