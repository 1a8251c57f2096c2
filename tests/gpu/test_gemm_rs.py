"""GEMM-ReduceScatter on GPUs: compiled kernels, NVLink."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import op_ranks, summed_gemm_ranks
from tests.distributed.gemm_calls import GEMMReduceScatter
from tests.gpu.op_suite import GPUSummedGEMMSuite
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestGEMMReduceScatter(GPUSummedGEMMSuite):
    kind = GEMMReduceScatter


@few_ranks
def test_methods_of_libraries_alternate_with_ours(on_gpus):
    counts = on_gpus(op_ranks.library_alternating, GEMMReduceScatter, 6)
    assert set(counts) == {24 if torch.cuda.device_count() >= len(counts) else 12}


@few_ranks
def test_garbage_between_launches_that_wait_for_peers_is_left_alone(on_gpus):
    assert set(on_gpus(summed_gemm_ranks.garbage_between_launches, 4)) == {4}
