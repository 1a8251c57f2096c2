"""Tunings of ranks that share a GPU: records of their own, and one warning."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from triton_dist._tuning import shared
from triton_dist.errors import TuningWarning
from triton_dist.kernels.common import libraries
from triton_dist.runtime import waits
from triton_dist.runtime.device import cuda
from triton_dist.runtime.device.cpu import CpuDevice
from triton_dist.runtime.device.cuda import CudaDevice
from triton_dist.runtime.ranks import SoloRank


@pytest.fixture
def gpu(monkeypatch):
    """One H200."""
    properties = SimpleNamespace(
        name="NVIDIA H200", multi_processor_count=132, clock_rate=1, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(cuda, "is_interpreting", lambda: False)
    monkeypatch.setattr(cuda, "_driver_version", lambda: "580.1")
    return CudaDevice(0)


@pytest.fixture
def sharing(monkeypatch):
    """Four ranks on it."""
    monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")


RANKS = SimpleNamespace(facts=lambda: {"world_size": "4", "local_world_size": "4"}, is_leader=True)
ALONE = "cuda, NVIDIA H200, local_world_size 4, world_size 4"


def test_one_rank_a_gpu_has_the_records_that_it_had(gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # more than GPUs, and not asked to share
    assert shared.hardware_of(gpu, RANKS) == ALONE
    assert gpu.facts()["gpu"] == "NVIDIA H200"


def test_records_of_a_shared_gpu_lie_apart_and_do_not_hold(gpu, sharing):
    mark = "NVIDIA H200 (shared by 4 ranks)"
    assert shared.hardware_of(gpu, RANKS) == ALONE.replace("NVIDIA H200", mark)
    assert gpu.facts()["gpu"] == mark
    assert mark in shared.hardware_of(gpu, SoloRank())  # a rank that tunes alone is not alone


def test_a_shared_gpu_has_no_libraries_that_need_one_alone(gpu, monkeypatch):
    assert gpu.has_nccl
    assert gpu.has_async_tp
    monkeypatch.setattr(libraries, "current_device", lambda: gpu)
    both = list(libraries.LibraryAlgorithm)
    assert libraries.supported_library_algorithms(libraries.ALL_GATHER_MATMUL) == both
    assert libraries.candidate_library_algorithms(libraries.ALL_GATHER_MATMUL) == both
    monkeypatch.setenv("TRITON_DIST_SHARE_GPUS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not gpu.has_nccl
    assert not gpu.has_async_tp
    # Asked for by name, the group's collective goes through the host.
    assert libraries.supported_library_algorithms(libraries.ALL_GATHER_MATMUL) == [
        libraries.LibraryAlgorithm.COLLECTIVE
    ]
    assert libraries.candidate_library_algorithms(libraries.ALL_GATHER_MATMUL) == []


def tunings(device, ranks):
    """Warnings of two tunings."""
    shared._warn_of_shared_gpus.cache_clear()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(2):
            with shared._bounded_trials(device, ranks, 1.0):
                assert waits.limit_seconds() == 1.0
    return [(each.category, str(each.message)) for each in given]


def test_the_leader_says_once_that_times_mean_little(gpu, sharing):
    ((category, text),) = tunings(gpu, RANKS)
    assert category is TuningWarning
    assert text.startswith("4 ranks share a GPU and run alternately on it")
    assert tunings(gpu, SimpleNamespace(is_leader=False)) == []


def test_others_are_not_warned(gpu, sharing, monkeypatch):
    assert tunings(CpuDevice(), RANKS) == []
    monkeypatch.delenv("TRITON_DIST_SHARE_GPUS")
    assert tunings(gpu, RANKS) == []
