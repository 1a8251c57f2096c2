"""Where the kernel with specialised warps is a candidate, without compiling it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from triton_dist.kernels.common.gemm import spaces as gemm_spaces
from triton_dist.kernels.common.gemm.launch import (
    WARP_SPECIALIZED_SPLIT_K_TILES,
    is_worth_trying,
    sharded_gemm,
    split_k_tiles,
)
from triton_dist.kernels.common.gemm.sharded import kernel_gemm_persistent
from triton_dist.kernels.common.gemm.spaces import WARP_SPECIALIZED_TILES, warp_specialized_tiles
from triton_dist.kernels.nvidia import ag_gemm
from triton_dist.kernels.nvidia.allgather_gemm.algorithms import ALGORITHMS
from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.runtime import triton_compat

SMALL = triton.Config(
    {
        "BLOCK_SIZE_M": 32,
        "BLOCK_SIZE_N": 16,
        "BLOCK_SIZE_K": 32,
        "GROUP_SIZE_M": 2,
        "WARP_SPECIALIZED": True,
    },
    num_warps=8,
    num_stages=3,
)


@pytest.fixture
def hopper(monkeypatch):
    """What the kernel asks of where it would run is answered as on an H200."""
    monkeypatch.setattr(gemm_spaces, "compiles_for_hopper", lambda: True)


def candidates():
    return [
        config["gemm_config"]
        for config in ALGORITHMS.config_space()
        if "gemm_config" in config and "WARP_SPECIALIZED" in config["gemm_config"].kwargs
    ]


def test_cpu_ranks_have_none():
    assert not triton_compat.compiles_for_hopper()
    assert warp_specialized_tiles() == []
    assert candidates() == []


def test_interpreted_the_ordinary_kernel_takes_its_place():
    A, B = torch.rand(40, 64).half(), torch.rand(64, 24).half()
    C = torch.full((40, 24), float("nan"), dtype=torch.float16)
    launch = sharded_gemm(A, B, C, SMALL, num_sms=3, persistent=True)
    assert launch.kernel is kernel_gemm_persistent
    assert "WARP_SPECIALIZED" not in launch.options
    launch.run()
    torch.testing.assert_close(C, (A.double() @ B.double()).half(), rtol=2e-3, atol=2e-3)


def test_on_hopper_each_is_a_candidate_once_in_one_chunk(hopper, monkeypatch):
    gpu = SimpleNamespace(
        interprets=False, has_nccl=True, has_async_tp=True, num_sms=132, prefers_descriptors=True
    )
    for function in (ALGORITHMS["full_mesh_push"].candidates, get_config_space, is_worth_trying):
        monkeypatch.setattr(sys.modules[function.__module__], "current_device", lambda: gpu)
    tiles = [*WARP_SPECIALIZED_TILES, *WARP_SPECIALIZED_SPLIT_K_TILES]
    assert list(dict.fromkeys(candidates())) == tiles
    space = [each for each in ALGORITHMS.config_space() if "gemm_config" in each]
    whole = [each["gemm_config"] for each in space if each["num_chunks"] == 1]
    assert [each for each in whole if each in tiles] == tiles
    # Those that a user gets for kernels of his own are for the ordinary kernel.
    assert not any("WARP_SPECIALIZED" in config.kwargs for config in get_config_space())


def test_without_gluon_there_is_none(hopper, monkeypatch):
    assert split_k_tiles()
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon.language", None)
    triton_compat.has_gluon_for_hopper.cache_clear()
    try:
        assert not triton_compat.has_gluon_for_hopper()
        assert warp_specialized_tiles() == []
    finally:
        triton_compat.has_gluon_for_hopper.cache_clear()


def test_without_a_driver_nothing_is_compiled(monkeypatch):
    def no_driver():
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(triton_compat, "is_interpreting", lambda: False)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=no_driver))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    assert not triton_compat.compiles_for_hopper()


@pytest.mark.parametrize(
    ("backend", "arch", "compiles"),
    [("cuda", 90, True), ("cuda", 80, False), ("cuda", 100, False), ("hip", "gfx942", False)],
)
def test_only_for_compute_capability_9(monkeypatch, backend, arch, compiles):
    monkeypatch.setattr(triton_compat, "is_interpreting", lambda: False)
    target = SimpleNamespace(backend=backend, arch=arch)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    assert triton_compat.compiles_for_hopper() is compiles


def matrix(rows, columns, dtype=torch.bfloat16):
    return torch.empty(rows, columns, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("A", "B", "kept"),
    [
        (matrix(512, 1024), matrix(1024, 7168), True),
        (matrix(512, 1024), matrix(7168, 1024).T, True),
        (matrix(512, 1024, torch.float16), matrix(1024, 7168, torch.float16), True),
        (matrix(512, 1024, torch.float32), matrix(1024, 7168, torch.float32), False),
        (matrix(512, 1024), matrix(1024, 2 * 7168)[:, ::2], False),
        (matrix(512, 1020), matrix(1020, 7168), False),  # rows of A: no multiple of 16 bytes
        (matrix(512, 1024), matrix(7164, 1024).T, False),  # rows of C: the same
    ],
)
def test_what_tma_and_wgmma_cannot_take_is_pruned(hopper, A, B, kept):
    config = {
        "gemm_config": WARP_SPECIALIZED_TILES[0],
        "persistent": True,
        "algorithm": "full_mesh_push",
        "num_streams": 1,
        "num_chunks": 1,
    }
    assert ag_gemm.prune_fn(config, A, B, SimpleNamespace(num_ranks=4)) is kept
