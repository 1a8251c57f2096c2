"""Facts of a device for the fingerprint, and its datasheet peaks, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist.runtime import peaks
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


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of some name, capability and number of SMs."""

    def become(name, capability="9.0", sms=132, reachable=True):
        facts = {"gpu": name, "capability": capability, "sms": str(sms)}
        device = SimpleNamespace(
            name="cuda", torch_device=torch.device("cuda", 0), facts=lambda: facts
        )
        monkeypatch.setattr(peaks, "current_device", lambda: device)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: reachable)
        peaks.device_peak.cache_clear()

    yield become
    peaks.device_peak.cache_clear()


@pytest.mark.parametrize(
    ("name", "tflops", "memory", "link"),
    [
        ("NVIDIA H200", 989.0, 4800.0, 450.0),
        ("NVIDIA H20", 148.0, 4000.0, 450.0),
        ("NVIDIA H100 80GB HBM3", 989.0, 3350.0, 450.0),
        ("NVIDIA H800", 989.0, 3350.0, 200.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 2039.0, 300.0),
        ("NVIDIA B200", 2250.0, 8000.0, 900.0),
    ],
)
def test_a_known_gpu(gpu, name, tflops, memory, link):
    gpu(name)
    peak = peaks.device_peak()
    assert (peak.tflops, peak.memory_gbps, peak.link_gbps) == (tflops, memory, link)
    assert peaks.get_intranode_max_speed_gbps() == link


def test_an_unknown_gpu_is_scaled_from_its_generation(gpu):
    gpu("NVIDIA Something", "9.0", sms=66)
    peak = peaks.device_peak()
    assert peak.tflops == pytest.approx(989.0 / 2)
    assert peak.sms == 66
    assert peak.link_gbps < 100


def test_gpus_that_do_not_reach_each_other_go_over_pcie(gpu):
    gpu("NVIDIA H200", reachable=False)
    assert peaks.get_intranode_max_speed_gbps() < 100


def test_cpu_ranks_prune_as_on_h200(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    peaks.device_peak.cache_clear()
    assert peaks.device_peak().tflops == 989.0
    assert peaks.get_intranode_max_speed_gbps() == 0.0
