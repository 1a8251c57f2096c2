"""Datasheet peaks: the right GPU, by its full name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist.runtime import peaks


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
