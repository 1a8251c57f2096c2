"""GEMM-AllReduce in a world of one, its config space, and the order of its tiles."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.gemm.spaces import tile_configs
from triton_dist.kernels.common.scatter.partials import chunks_of_row_block, row_block_rows
from triton_dist.kernels.common.scatter.tiles import tile_in_scatter_order
from triton_dist.kernels.nvidia import (
    create_gemm_ar_context,
    gemm_ar,
)
from triton_dist.kernels.nvidia.gemm import op as gemm_op
from triton_dist.kernels.nvidia.gemm_allreduce import algorithms as gemm_allreduce_algorithms

config_space = gemm_allreduce_algorithms.ALGORITHMS.config_space
prune_fn, key_fn = gemm_ar.prune_fn, gemm_ar.key_fn


def create(max_M=16, N=48, dtype=torch.float16):
    return create_gemm_ar_context(max_M, N, 0, 1, 8, dtype)


def test_the_space_has_tiles_and_ways():
    space = config_space()
    assert len({str(config) for config in space}) == len(space)
    assert {config["algorithm"] for config in space} == set(gemm_allreduce_algorithms.ALGORITHMS)
    assert {config.get("persistent") for config in space} == {True, None}
    assert {config.get("num_chunks") for config in space} == {1, 2, 4, None}
    reductions = {config.get("reduction") for config in space}
    assert reductions == {"one_shot", "two_shot", "two_shot_in_packets", None}


@pytest.fixture
def on_a_gpu(monkeypatch):
    gpu = SimpleNamespace(
        name="cuda", interprets=False, has_nccl=True, has_async_tp=True, prefers_descriptors=True,
        shared_memory_bytes=lambda: 232448,
        facts=lambda: {"gpu": "NVIDIA H200"},
    )  # fmt: skip
    for module in (gemm_allreduce_algorithms, gemm_op, spaces):
        monkeypatch.setattr(module, "current_device", lambda: gpu)


def left(rows, N=8192, num_ranks=4, step=1):
    A = torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta")
    B = torch.empty(1024, N * step, dtype=torch.bfloat16, device="meta")[:, ::step]
    ctx = SimpleNamespace(num_ranks=num_ranks)
    return [config for config in config_space() if prune_fn(config, A, B, ctx)]


def test_one_rank_has_one_way(on_a_gpu):
    assert left(4, num_ranks=1) == [{"algorithm": "collective"}]


@pytest.mark.parametrize("rows", [1, 64, 256, 257, 4091, 16384])
def test_what_is_tried_on_a_gpu(on_a_gpu, rows):
    """Every way at any M, but that parts of more than 4 MB do not go to all, for the largest M of
    the key."""
    kept = left(rows)
    left_out = {"by_size"}
    # Of 8192 columns of 16 bits, 256 rows are 4 MB, and 16 rows 256 KB.
    left_out |= {"one_shot"} if rows > 256 else set()
    left_out |= {"one_shot_in_packets"} if rows > 16 else set()
    left_out |= {"two_shot_in_one_launch"} if rows > 2048 else set()
    assert {
        config["algorithm"] for config in kept
    } == gemm_allreduce_algorithms.ALGORITHMS.keys() - left_out
    assert 20 <= len(kept) <= 80
    heights = {
        algorithm: {
            c["gemm_config"].kwargs["BLOCK_SIZE_M"] for c in kept if c["algorithm"] == algorithm
        }
        for algorithm in ("one_shot", "one_shot_in_packets", "two_shot", "two_shot_in_one_launch")
    }
    assert heights["one_shot_in_packets"] <= {16}
    assert (16 in heights["one_shot"]) is (rows <= 64)
    assert min(heights["two_shot"]) == 64
    # In one launch, tiles are of all rows.
    assert (256 in heights["two_shot"] | heights["two_shot_in_one_launch"]) is (rows > 128)


def test_the_kernel_on_pointers_is_tried_where_descriptors_are_not_preferred(on_a_gpu, monkeypatch):
    def kinds(step=1):
        return {each["persistent"] for each in left(64, step=step) if "persistent" in each}

    assert kinds() == {True}
    assert kinds(step=2) == {True}  # no descriptor serves the operands: by pointers all the same
    monkeypatch.setattr(spaces.current_device(), "prefers_descriptors", False)
    assert kinds() == {True, False}


def test_all_of_a_bucket_keep_the_same(on_a_gpu):
    for bucket in (range(129, 161), range(225, 257), range(257, 321), range(385, 449)):
        first, *others = ([str(config) for config in left(rows)] for rows in bucket[::30])
        assert all(each == first for each in others)


def test_on_cpu_ranks_kernels_of_ours_are_tried():
    kept = left(64, N=256)
    ours = gemm_allreduce_algorithms.ALGORITHMS.keys() - {
        "by_size",
        "collective",
        "symmetric_collective",
    }
    assert {config["algorithm"] for config in kept} == ours


def test_row_blocks_have_all_rows():
    for M in (1, 15, 16, 17, 64, 100, 4091, 4096):
        for num_ranks in (2, 3, 4, 8):
            rows = row_block_rows(M, num_ranks)
            assert rows % 16 == 0
            assert M <= rows * num_ranks < M + 16 * num_ranks


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_order_of_tiles_allows_no_circle_of_waits(num_ranks, num_chunks):
    """Each tile once; and what the owner of a tile waits for, its peers have at earlier places."""
    (config,) = tile_configs((16, 32, 64, 4, 2, 2))
    rows, N = 16 * 7, 32 * 3
    chunks = chunks_of_row_block(config, rows, N, num_chunks)
    place = {}
    for rank in range(num_ranks):
        for index in range(num_ranks * 21):
            found = tile_in_scatter_order.fn(
                index, rank, num_ranks, 7, 3, chunks.tiles_m, chunks.group_size_m
            )
            row_block, tile, m, n = map(int, found)
            place[rank, row_block, tile] = index, (m, n)
    assert len(place) == num_ranks * num_ranks * 21
    for rank in range(num_ranks):
        for tile in range(21):
            own, where = place[rank, rank, tile]
            peers = [place[peer, rank, tile] for peer in range(num_ranks) if peer != rank]
            assert all(index < own and there == where for index, there in peers)
    for row_block in range(num_ranks):
        assert len({place[0, row_block, tile][1] for tile in range(21)}) == 21
