"""A thousand random calls of each overlapped op, eager and in graphs: none wrong, none that hangs.
Where ranks share a GPU, and take milliseconds a call, as many with ``-m "gpu and stress"`` alone.

Rows, configs, stragglers and data change from call to call; calls of a batch follow one another
with nothing in between. Ranks that hang are ended by ``spawn_ranks``, with their stacks.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.distributed import overlap_stress
from tests.distributed.overlap_stress import Load, summarise
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
CALLS = 1000
LOADS = {
    "bfloat16": Load(CALLS, 1024, 1024, 2048, torch.bfloat16, configs=16),
    # Odd sizes: no descriptor can read these, and shards are of a few rows.
    "float16, odd": Load(CALLS, 61, 333, 515, torch.float16, configs=12, seed=1),
    "gemm_rs": Load(CALLS, 512, 2048, 1024, torch.bfloat16, configs=16, op="gemm_rs"),
    "gemm_rs, odd": Load(CALLS, 61, 333, 515, torch.float16, configs=8, seed=1, op="gemm_rs"),
    # Up to what can go to all ranks; few rows, as of decoding; and what goes in packets.
    "gemm_ar": Load(CALLS, 1024, 2048, 1024, torch.bfloat16, configs=24, op="gemm_ar"),
    "gemm_ar, few": Load(CALLS, 64, 4096, 1024, torch.bfloat16, configs=24, op="gemm_ar"),
    "gemm_ar, fewest": Load(CALLS, 16, 4096, 1024, torch.bfloat16, configs=24, op="gemm_ar"),
    "gemm_ar, odd": Load(CALLS, 131, 333, 515, torch.float16, configs=12, seed=1, op="gemm_ar"),
}


EACH_LOAD = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


@few_ranks
@EACH_LOAD
def test_random_calls(on_gpus, load, alternate):
    load = fewer(load) if alternate else load
    results = on_gpus(overlap_stress.random_calls, load)
    assert summarise(results, load.calls) == ""


@few_ranks
@EACH_LOAD
def test_random_replays(on_gpus, load, alternate):
    load = fewer(load) if alternate else load
    results = on_gpus(overlap_stress.random_replays, load, 8 if alternate else 24)
    assert summarise(results, load.calls) == ""


def fewer(load: Load) -> Load:
    return dataclasses.replace(load, calls=40, configs=min(load.configs, 8))


@pytest.mark.stress
@pytest.mark.parametrize("num_ranks", [2, 4], indirect=True)
@EACH_LOAD
def test_a_thousand_calls_where_ranks_share_a_gpu(on_gpus, load, alternate):
    if not alternate:
        pytest.skip("each rank has a GPU: the tests above make a thousand")
    assert summarise(on_gpus(overlap_stress.random_calls, load), CALLS) == ""
    assert summarise(on_gpus(overlap_stress.random_replays, load, 24), CALLS) == ""
