"""GEMM-AllReduce on GPUs: compiled kernels, NVLink.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest

from tests.distributed import gemm_ar_calls, gemm_ar_ranks
from tests.gpu.ranks import few_ranks
from tests.gpu.summed_gemm import SummedGEMM

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestGEMMAllReduce(SummedGEMM):
    kind = gemm_ar_calls.Calls


@few_ranks
def test_any_number_of_rows(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.every_size, 4)) == {8 * len(gemm_ar_calls.TILED)}


@few_ranks
def test_every_rank_has_the_same_bits(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.same_bits_on_all_ranks)) == {2 * len(gemm_ar_calls.ALGORITHMS)}


@few_ranks
def test_a_result_without_a_copy_outlives_the_next_call(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.borrowed_results)) == {7}


@few_ranks
def test_whole_products_take_turns_with_tiles(on_gpus, alternate):
    number = 8 if alternate else 12  # the ways are 8
    assert set(on_gpus(gemm_ar_ranks.whole_alternating, number)) == {3 * number}
