"""GEMM-ReduceScatter on GPUs: compiled kernels, NVLink.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest
import torch

from tests.distributed import gemm_rs_calls, gemm_rs_ranks
from tests.gpu.ranks import few_ranks
from tests.gpu.summed_gemm import SummedGEMM

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestGEMMReduceScatter(SummedGEMM):
    kind = gemm_rs_calls.Calls


@few_ranks
def test_vendor_methods_take_turns_with_ours(on_gpus):
    counts = on_gpus(gemm_rs_ranks.library_alternating, 6)
    assert set(counts) == {24 if torch.cuda.device_count() >= len(counts) else 12}


@few_ranks
def test_garbage_between_launches_that_wait_for_peers_is_left_alone(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.garbage_between_launches, 4)) == {4}
