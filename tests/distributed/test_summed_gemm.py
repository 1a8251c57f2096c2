"""GEMM-ReduceScatter and GEMM-AllReduce over real processes: the kernels in the interpreter, memory
in /dev/shm."""

from __future__ import annotations

import pytest

from tests.distributed import op_ranks, summed_gemm_ranks
from tests.distributed.gemm_calls import GEMMAllReduce, GEMMReduceScatter
from tests.distributed.summed_gemm_suite import SummedGEMMSuite


class TestGEMMReduceScatter(SummedGEMMSuite):
    kind = GEMMReduceScatter


class TestGEMMAllReduce(SummedGEMMSuite):
    """Without tests of code that the GEMM-ReduceScatter shares."""

    kind = GEMMAllReduce
    test_any_rank_may_be_late = None
    test_a_call_that_gave_up_leaves_nothing_behind = None
    test_epochs_may_wrap_around = None
    test_row_blocks_in_any_number_of_chunks = None
    test_a_kernel_that_raises_leaves_nothing_queued = None
    test_every_size_and_layout = None
    test_only_calls_out_of_turn_check_their_peers = None


@pytest.mark.stress
class TestAllOfGEMMAllReduce(SummedGEMMSuite):
    kind = GEMMAllReduce


def test_a_result_without_a_copy_outlives_the_next_call(on_any):
    assert set(on_any(summed_gemm_ranks.borrowed_results)) == {7}


def test_whole_products_alternate_with_tiles(on_two):
    assert set(on_two(summed_gemm_ranks.whole_alternating, 3)) == {9}


def test_too_many_rows_for_an_algorithm_are_an_error(on_two):
    for run, algorithm, limit in (
        (summed_gemm_ranks.too_large_for_one_shot, "one_shot", "M above 2"),
        (summed_gemm_ranks.too_large_for_packets, "one_shot_in_packets", "128"),
    ):
        for message in on_two(run):
            assert message.startswith(f"gemm_ar: algorithm is '{algorithm}', expected another")
            assert limit in message


def test_methods_of_libraries_alternate_with_ours(on_two):
    assert set(on_two(op_ranks.library_alternating, GEMMReduceScatter, 4)) == {8}


def test_what_peers_wait_for_comes_before_another_launch(spawn_ranks):
    """Loading a kernel, launching one that is not loaded, and perhaps freeing memory wait for the
    GEMM, which waits for what the peers push."""
    order = [
        "compile kernel_add_deferred, uncollected",
        "run kernel_gemm_scatter_persistent, uncollected",
        "queue, uncollected",
        "run kernel_add_deferred",
        "run kernel_finish_epoch",
    ]
    assert spawn_ranks(2, summed_gemm_ranks.order_of_row_blocks) == [order] * 2
