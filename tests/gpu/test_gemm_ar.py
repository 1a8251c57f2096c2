"""GEMM-AllReduce on GPUs: compiled kernels, NVLink."""

from __future__ import annotations

import pytest

from tests.distributed import summed_gemm_ranks
from tests.distributed.gemm_calls import GEMMAllReduce
from tests.distributed.test_summed_gemm import (  # noqa: F401
    test_a_result_without_a_copy_outlives_the_next_call,
)
from tests.gpu.op_suite import GPUSummedGEMMSuite
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestGEMMAllReduce(GPUSummedGEMMSuite):
    kind = GEMMAllReduce


def test_every_rank_has_the_same_bits(on_any):
    calls = 2 * len(GEMMAllReduce.algorithms)
    assert set(on_any(summed_gemm_ranks.same_bits_on_all_ranks)) == {calls}


@few_ranks
def test_whole_products_alternate_with_tiles(on_gpus, alternate):
    number = 8 if alternate else 12  # there are 8 algorithms
    assert set(on_gpus(summed_gemm_ranks.whole_alternating, number)) == {3 * number}
