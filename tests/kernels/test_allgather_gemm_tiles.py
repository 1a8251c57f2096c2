"""Which tiles are tried for how many rows, on a GPU of 132 SMs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from triton_dist.kernels.common.gemm import launch as gemm_launch
from triton_dist.kernels.common.gemm.launch import (
    FUSED_PUSH_CANDIDATES,
    SPLIT_K_TILES,
    is_worth_trying,
    max_split_workspace_size,
    split_k_tiles,
)
from triton_dist.kernels.common.gemm.sharded import workspace_size
from triton_dist.kernels.common.gemm.spaces import PERSISTENT_TILES, max_rows_of_key
from triton_dist.kernels.nvidia import ag_gemm


@pytest.fixture(autouse=True)
def _h200(monkeypatch):
    gpu = SimpleNamespace(
        name="cuda", interprets=False, has_nccl=True, has_async_tp=True, num_sms=132
    )
    monkeypatch.setattr(gemm_launch, "current_device", lambda: gpu)


def kept(tiles, rows, columns=7168, num_ranks=4):
    return [config for config in tiles if is_worth_trying(config, rows, columns, num_ranks)]


def test_each_tile_is_there_once():
    both = [*PERSISTENT_TILES, *SPLIT_K_TILES]
    assert len({str(config.all_kwargs()) for config in both}) == len(both)


@pytest.mark.parametrize(
    ("rows", "tiles", "tried"),
    [
        (512, 448, True),  # 3.39 waves: of the last 52 tiles, two parts each, half a wave
        (481, 448, True),  # the same range
        (256, 224, False),  # 1.70: the last 92 are 184 units, as many waves as before
        (128, 112, False),  # 0.85
        (64, 112, False),
        (2048, 1792, False),  # 13.58
        (4096, 3584, False),  # 27.15: half of one in 28 is too little
    ],
)
def test_a_cut_is_tried_where_it_saves_waves(rows, tiles, tried):
    assert 4 * -(-max_rows_of_key(rows, 4) // 128) * (7168 // 256) == tiles
    assert kept(SPLIT_K_TILES, rows) == (list(SPLIT_K_TILES) if tried else [])


@pytest.mark.parametrize("rows", [1024, 2048, 4096])
def test_many_rows_do_without_tiles_of_64(rows):
    assert len(kept(PERSISTENT_TILES, rows)) < len(PERSISTENT_TILES)
    assert PERSISTENT_TILES[0] in kept(PERSISTENT_TILES, rows)


def test_shards_of_a_wave_or_more_are_not_visited_together():
    """Of 512 rows, a shard has 112 tiles of 128 x 256; of 1024, 224."""
    together = [c for c, *_ in FUSED_PUSH_CANDIDATES if c.kwargs["GROUP_SIZE_SHARDS"] > 1]
    alone = [c for c, *_ in FUSED_PUSH_CANDIDATES if c.kwargs["GROUP_SIZE_SHARDS"] == 1]
    assert together[0] in kept(together, 512)
    assert kept(together, 1024) == []
    assert kept(alone, 1024) == alone


@pytest.mark.parametrize("num_sms", [2, 132, 148])
def test_every_last_wave_has_room_in_the_workspace(num_sms):
    room = max_split_workspace_size(num_sms)
    for config in split_k_tiles():
        needed = [workspace_size(config, tiles, num_sms) for tiles in range(3 * num_sms)]
        assert max(elements for elements, _ in needed) <= room[0]
        assert max(counters for _, counters in needed) == room[1] == num_sms - 1


def test_a_b_that_tma_cannot_read_is_not_tried_with_cuts():
    config = {
        "gemm_config": SPLIT_K_TILES[0],
        "persistent": True,
        "algorithm": "full_mesh_push",
        "num_streams": 1,
        "num_chunks": 1,
    }
    A = torch.empty(512, 8192, dtype=torch.float16, device="meta")
    B = torch.empty(8192, 7168, dtype=torch.float16, device="meta")
    strided = torch.empty(8192, 2 * 7168, dtype=torch.float16, device="meta")[:, ::2]
    ctx = SimpleNamespace(num_ranks=4)
    assert ag_gemm.prune_fn(config, A, B, ctx)
    assert not ag_gemm.prune_fn(config, A, strided, ctx)
