"""GEMM-ReduceScatter in a world of one, and its config space."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton

from tests.distributed.gemm_calls import default_tiles
from triton_dist.errors import CaptureInProgress, InvalidArgument
from triton_dist.kernels.common import libraries
from triton_dist.kernels.common.gemm import spaces
from triton_dist.kernels.common.scatter.partials import (
    Chunks,
    chunks_of_row_block,
    tiles_of_row_block,
)
from triton_dist.kernels.nvidia import create_gemm_rs_context, gemm_rs
from triton_dist.kernels.nvidia.gemm import get_config_space
from triton_dist.kernels.nvidia.gemm_reduce_scatter import (
    algorithms as gemm_reduce_scatter_algorithms,
)
from triton_dist.runtime.device import current_device

config_space = gemm_reduce_scatter_algorithms.ALGORITHMS.config_space
prune_fn, key_fn = gemm_rs.prune_fn, gemm_rs.key_fn


def create(max_M=16, N=48, dtype=torch.float16, **options):
    return create_gemm_rs_context(max_M, N, 0, 1, 8, dtype, **options)


def test_the_space_has_tiles_and_transfers(monkeypatch):
    space = config_space()
    assert len({str(config) for config in space}) == len(space)
    tiled = [config for config in space if "gemm_config" in config]
    assert all(config["persistent"] for config in tiled), "the other kind is for GPUs alone"
    assert {config["algorithm"] for config in space} == {
        "fused",
        "one_launch",
        "copy_engine",
        "row_blocks",
        "serial",
    }
    assert gemm_rs.config_space.names == set().union(*space)
    gpu = SimpleNamespace(
        name="cuda", interprets=False, has_nccl=True, has_async_tp=True, prefers_descriptors=True,
        launches_block=False,
    )  # fmt: skip
    for module in (libraries, gemm_reduce_scatter_algorithms):
        monkeypatch.setattr(module, "current_device", lambda: gpu)
    monkeypatch.setattr(libraries, "has_operator", lambda operator: True)
    assert config_space()[-2:] == [{"algorithm": "collective"}, {"algorithm": "async_tp"}]


def test_what_is_pruned():
    rows = 8 * max(config.kwargs["BLOCK_SIZE_M"] for config in get_config_space())
    A, B = torch.empty(2 * rows, 64, dtype=torch.float16), torch.empty(64, 64, dtype=torch.float16)
    space = [*config_space(), {"algorithm": "collective"}]
    space = [config for config in space if config["algorithm"] != "row_blocks"]  # tested below

    def left(num_ranks, reduce_st=False):
        ctx = SimpleNamespace(num_ranks=num_ranks, reduce_st=reduce_st)
        return [config for config in space if prune_fn(config, A, B, ctx)]

    fused = [config for config in space if config["algorithm"] == "fused"]
    # Eight rows of tiles of a row block, as many as there are chunks, and too few bytes for its own
    # launch of a reduce-scatter.
    not_serial = [config for config in space if config["algorithm"] != "serial"]
    assert left(2) == not_serial
    assert left(1) == fused
    assert left(2, reduce_st=True) == fused
    ctx = SimpleNamespace(num_ranks=2, reduce_st=True)
    assert all(prune_fn(config, A, B, ctx, reduce_st=False) for config in not_serial)
    few = [config for config in space if prune_fn(config, A[:4], B, ctx, reduce_st=False)]
    assert {config.get("num_chunks") for config in few} == {1, None}


def test_k_is_split_for_few_rows_if_the_parts_occupy_most_sms(monkeypatch):
    monkeypatch.setattr(spaces, "current_device", lambda: SimpleNamespace(num_sms=132))

    def tried(M, N):
        return [
            (config.kwargs["BLOCK_SIZE_M"], config.kwargs["SPLIT_K"])
            for config in spaces.SPLIT_TILES
            if spaces.fits_split(config, M, N)
        ]

    assert tried(16, 6144) == [(16, 4), (16, 5), (32, 4), (32, 5), (64, 2)]
    assert tried(64, 8192) == [(64, 2)]
    assert tried(16, 4096) == [(16, 5), (16, 8), (32, 5), (64, 4)]
    assert tried(80, 6144) == tried(16, 32768) == []


def test_row_blocks_are_for_large_products_in_fp8_or_on_more_than_two_ranks():
    space = [config for config in config_space() if config["algorithm"] == "row_blocks"]
    ctx, scale = SimpleNamespace(num_ranks=2, reduce_st=False), torch.ones(1)

    def left(num_ranks, dtype=torch.float8_e4m3fn, rows=128):
        ctx = SimpleNamespace(num_ranks=num_ranks, reduce_st=False)
        A = torch.empty(num_ranks * rows, 16, dtype=dtype)
        B = torch.empty(128 * current_device().num_sms, 16, dtype=dtype).t()
        scales = {"A_scale": scale, "B_scale": scale} if dtype.itemsize == 1 else {}
        return [config["num_chunks"] for config in space if prune_fn(config, A, B, ctx, **scales)]

    assert left(2) == left(4) == left(4, torch.float16) == [1, 2]
    assert left(2, torch.float16) == left(4, torch.float16, rows=127) == []
    B = torch.empty(64, 16, dtype=torch.float8_e4m3fn).t()
    assert not prune_fn(space[0], B.t(), B, ctx, A_scale=scale, B_scale=scale)


def test_a_serial_way_is_for_sums_that_one_launch_scatters():
    (serial,) = [config for config in config_space() if config["algorithm"] == "serial"]
    B = torch.empty(64, 8192, dtype=torch.float16)
    ctx = SimpleNamespace(num_ranks=2, reduce_st=False)
    tried = [M for M in (2, 256, 4096, 8192) if prune_fn(serial, torch.empty(M, 64).half(), B, ctx)]
    assert tried == [256, 4096]


def test_chunks_are_whole_groups_of_tiles():
    config = triton.Config({"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "GROUP_SIZE_M": 8})

    def chunks(rows, num_chunks, N=512):
        found = chunks_of_row_block(config, rows, N, num_chunks)
        assert sum(found.rows) == rows
        assert sum(found.tiles) == tiles_of_row_block(config, rows, N)
        return found

    assert chunks(2048, 1) == Chunks(16, 8, (2048,), (32,))
    assert chunks(2048, 2) == Chunks(8, 8, (1024, 1024), (16, 16))
    assert chunks(2048, 4) == Chunks(4, 4, (512,) * 4, (8,) * 4)
    assert chunks(2000, 3) == Chunks(6, 6, (768, 768, 464), (12, 12, 8))
    assert chunks(40 * 128, 4) == Chunks(16, 8, (2048, 2048, 1024), (32, 32, 16))  # 10 are no group
    assert chunks(100, 8, N=257) == Chunks(1, 1, (100,), (2,))


def test_tile_shapes_are_pushed_once():
    pushed = [config for config in config_space() if config["algorithm"] == "copy_engine"]
    shapes = {
        (str({**config["gemm_config"].all_kwargs(), "GROUP_SIZE_M": 0}), config["num_chunks"])
        for config in pushed
    }
    assert len(shapes) == len(pushed)
    assert {config["num_chunks"] for config in pushed} == {1, 2, 4, 8}


def test_a_sum_is_not_pushed_by_row_blocks():
    A, B = torch.ones(4, 8).half(), torch.ones(8, 48).half()
    with (
        create(reduce_st=True) as ctx,
        pytest.raises(InvalidArgument, match="expected 'fused' with reduce_st=True"),
    ):
        gemm_rs.fn(A, B, ctx, default_tiles(), fuse_scatter=False)


def test_no_copy_engine_where_a_launch_waits_for_its_kernel(monkeypatch):
    """What pushes for the GEMM would be queued when it has ended."""
    monkeypatch.setattr(type(current_device()), "launches_block", True)
    A, B = torch.ones(2048, 64).half(), torch.ones(64, 64).half()
    ctx = SimpleNamespace(num_ranks=2, reduce_st=False)
    left = [config for config in config_space() if prune_fn(config, A, B, ctx)]
    assert {config["algorithm"] for config in left} == {"fused", "one_launch"}
    with create(max_M=8) as ctx, pytest.raises(InvalidArgument, match="CUDA_LAUNCH_BLOCKING"):
        gemm_rs.fn(A[:8], torch.ones(64, 48).half(), ctx, default_tiles(), fuse_scatter=False)


def test_one_call_before_a_capture_is_enough(monkeypatch):
    """What a call makes for later ones is made for both slots: a graph may begin with either."""
    with create_gemm_rs_context(32, 48, 0, 1, 1, torch.float16) as ctx:
        buffer, device = ctx.buffer, type(current_device())
        before = buffer.tile_memory("row_block")
        monkeypatch.setattr(device, "is_capturing", lambda _: True)
        buffer.slots.take()
        assert buffer.tile_memory("row_block") is not before
    with create_gemm_rs_context(32, 48, 0, 1, 1, torch.float16) as ctx:
        assert ctx.buffer.tile_memory("tile").mode == "tile"
        with pytest.raises(CaptureInProgress, match="before the capture"):
            ctx.buffer.tile_memory("row_block")
