"""Which tiles are tried for shards of few rows, on a GPU of 132 SMs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist import tune
from triton_dist.kernels.common.split_k import split_tiles
from triton_dist.kernels.nvidia import AllGatherMethod, allgather_gemm, allgather_gemm_tiles
from triton_dist.kernels.nvidia.allgather_gemm_tiles import (
    FEW_ROWS_TILES,
    MOST_PARTIALS,
    MOST_SPLIT_TILES,
    fits_shape,
)
from triton_dist.kernels.nvidia.gemm import PERSISTENT_TILES


@pytest.fixture(autouse=True)
def _h200(monkeypatch):
    gpu = SimpleNamespace(name="cuda", num_sms=132)
    monkeypatch.setattr(allgather_gemm_tiles, "current_device", lambda: gpu)


def kept(tiles, rows, columns=7168, num_ranks=4):
    return [config for config in tiles if fits_shape(config, rows, columns, num_ranks)]


def cuts(rows, **options):
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "SPLIT_K", "SPLIT_TAIL_ONLY")
    return {tuple(c.kwargs[name] for name in names) for c in kept(FEW_ROWS_TILES, rows, **options)}


def test_each_tile_is_there_once():
    both = [*PERSISTENT_TILES, *FEW_ROWS_TILES]
    assert len({str(config.all_kwargs()) for config in both}) == len(both)


@pytest.mark.parametrize("rows", [1024, 2048, 4096])
def test_many_rows_are_not_slowed_by_more_candidates(rows):
    assert kept(FEW_ROWS_TILES, rows) == []
    assert len(kept(PERSISTENT_TILES, rows)) < len(PERSISTENT_TILES)
    assert PERSISTENT_TILES[0] in kept(PERSISTENT_TILES, rows)


def test_one_wave_that_is_not_full_is_cut_in_all_its_tiles():
    """112 tiles of 128 x 256; seven parts fill 5.94 of 6 waves, and 28 tiles of the own shard
    would leave 104 SMs without work."""
    found = cuts(128)
    assert {(128, 256, 4, False), (128, 256, 7, False)} <= found
    assert not any(tail for _, _, _, tail in found)


def test_the_tail_of_some_waves_is_cut():
    """448 tiles, 3.39 waves: 52 tiles in two parts are half a wave, in five 0.4 waves."""
    assert {(128, 256, 2, True), (128, 256, 5, True)} <= cuts(512)


def test_a_cut_that_saves_nothing_is_pruned():
    """224 tiles: two parts of the last 92 are 184 units, as many waves as before."""
    assert (128, 256, 2, True) not in cuts(256)
    assert (128, 256, 4, True) in cuts(256)


def test_parts_have_room_in_the_workspace_for_all_rows_of_a_bucket():
    for num_ranks in (2, 4, 8):
        for rows in (1, 17, 100, 129, 300, 513, 700):
            for config in kept(FEW_ROWS_TILES, rows, num_ranks=num_ranks):
                for other in range(tune.bucket(rows) // 2 + 1, tune.bucket(rows) + 1, 7):
                    count = num_ranks * -(-other // config.kwargs["BLOCK_SIZE_M"])
                    count *= -(-7168 // config.kwargs["BLOCK_SIZE_N"])
                    partials, counters = split_tiles(config, count, 132)
                    assert partials <= MOST_PARTIALS
                    assert counters <= MOST_SPLIT_TILES


def test_a_b_that_tma_cannot_read_is_not_tried_with_cuts():
    config = {
        "gemm_config": FEW_ROWS_TILES[0],
        "persistent": True,
        "method": AllGatherMethod.FULL_MESH_PUSH,
    }
    A = torch.empty(128, 8192, dtype=torch.float16, device="meta")
    B = torch.empty(8192, 7168, dtype=torch.float16, device="meta")
    strided = torch.empty(8192, 2 * 7168, dtype=torch.float16, device="meta")[:, ::2]
    ctx = SimpleNamespace(num_ranks=4)
    assert allgather_gemm.prune_fn(config, A, B, ctx)
    assert not allgather_gemm.prune_fn(config, A, strided, ctx)
