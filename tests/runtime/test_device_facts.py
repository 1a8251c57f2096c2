"""What a device says about itself for the fingerprint, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist.runtime.device import cuda
from triton_dist.runtime.device.cpu import CpuDevice


@pytest.fixture(autouse=True)
def _forget():
    cuda._peer_access.cache_clear()
    cuda._driver_version.cache_clear()
    yield
    cuda._peer_access.cache_clear()
    cuda._driver_version.cache_clear()


def gpus(monkeypatch, count, reaches):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)


@pytest.mark.parametrize(
    ("count", "reaches", "said"),
    [
        (4, lambda a, b: True, "full mesh of 4"),
        (4, lambda a, b: a // 2 == b // 2, "4 of 12 pairs"),
        (4, lambda a, b: False, "none"),
        (1, lambda a, b: True, "none"),
    ],
)
def test_how_gpus_reach_one_another(monkeypatch, count, reaches, said):
    gpus(monkeypatch, count, reaches)
    assert cuda._peer_access() == said


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\nGCC\n",
    ],
)
def test_the_driver_is_the_kernel_modules(monkeypatch, tmp_path, text):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "version")
    assert cuda._driver_version() == "550.54.15"


@pytest.mark.parametrize(("status", "said"), [(0, "12.8"), (3, "unknown")])
def test_where_the_kernel_does_not_show_it_the_driver_is_asked(monkeypatch, tmp_path, status, said):
    def ask(name):
        assert name == "cuDriverGetVersion"
        return get_version

    def get_version(version):
        version._obj.value = 12080
        return status

    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setattr(cuda.cuda_driver, "function", ask)
    assert cuda._driver_version() == said


def test_a_gpu_says_all_that_can_change_code_or_timing(monkeypatch, tmp_path):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.1.2 \n")
    monkeypatch.setattr(cuda, "_DRIVER_FILE", tmp_path / "version")
    gpus(monkeypatch, 8, lambda a, b: True)
    device = object.__new__(cuda.CudaDevice)
    device.num_sms = 132
    device._properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device.facts()["gpu"] == "NVIDIA H200 (interpreter)"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert device.facts() == {
        "gpu": "NVIDIA H200",
        "gpus_on_host": "8",
        "capability": "9.0",
        "sms": "132",
        "driver": "570.1.2",
        "peer_access": "full mesh of 8",
    }


@pytest.mark.parametrize(("interpreted", "gpu"), [("1", "none (interpreter)"), ("0", "none")])
def test_the_cpu_says_that_there_is_no_gpu_and_what_runs_in_its_place(
    monkeypatch, interpreted, gpu
):
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    assert CpuDevice().facts()["gpu"] == gpu
