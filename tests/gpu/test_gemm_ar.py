"""GEMM-AllReduce on GPUs: compiled kernels, NVLink; what CPU ranks check, and graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import functools

import pytest

from tests.distributed import gemm_ar_ranks
from triton_dist.testing import spawn_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(
    params=[pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in (2, 4)]
)
def on_gpus(request):
    """``on_gpus(fn, *args)``: what ``fn`` returns, by rank; one rank per GPU."""
    return functools.partial(spawn_ranks, request.param, device="cuda", timeout=500)


def test_every_way_and_both_kernels(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.every_way)) == {24}


def test_any_number_of_rows(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.every_size, 4)) == {40}


def test_slabs_in_any_number_of_chunks(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.chunked, 16)) == {48}


def test_a_kernel_that_raises_leaves_nothing_queued(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.a_kernel_that_raises)) == {3}


@pytest.mark.parametrize("dtype", gemm_ar_ranks.DTYPES)
def test_every_size_and_layout(on_gpus, dtype):
    assert set(on_gpus(gemm_ar_ranks.every_operand, (dtype,))) == {40}


def test_calls_need_nothing_between_them(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.back_to_back, 60)) == {80}


def test_shapes_that_fill_the_gpu(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.many_tiles, 12)) == {72}


def test_any_rank_may_be_late(on_gpus):
    counts = on_gpus(gemm_ar_ranks.stragglers)
    assert counts == [7 * len(counts)] * len(counts)


def test_the_same_operands_give_the_same_bits(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.same_bits, 20)) == {100}


def test_every_rank_has_the_same_bits(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.same_bits_on_all_ranks)) == {12}


def test_a_result_without_a_copy_outlives_the_next_call(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.borrowed_results)) == {7}


def test_every_candidate_gives_the_same(on_gpus):
    (count,) = set(on_gpus(gemm_ar_ranks.every_config))
    assert count > 60


def test_tuned_over_the_ranks(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.tuned)) == {(3, 9)}


def test_captured_in_graphs(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.replayed, 20)) == {240}


def test_whole_products_take_turns_with_tiles(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.whole_in_turn, 12)) == {36}


def test_epochs_may_wrap_around(on_gpus):
    assert set(on_gpus(gemm_ar_ranks.epochs_wrap_around)) == {15}


def test_only_calls_out_of_turn_look_at_their_peers(on_gpus):
    looks = [0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert all(seen == looks for seen in on_gpus(gemm_ar_ranks.looks_at_peers))


def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus):
    first, *others = on_gpus(gemm_ar_ranks.give_up_and_start_again)
    flags = ["all_reduce.arrivals"] * 2 + ["gemm_ar.arrivals"] * 8 + ["all_reduce.arrivals"] * 2
    assert [flag.rstrip("01") for flag in first] == flags
    assert others == [[]] * len(others)


def test_a_bad_call_names_the_argument_and_launches_nothing(on_gpus):
    for seen in on_gpus(gemm_ar_ranks.every_bad_call):
        assert {launched for _, _, launched in seen.values()} == {0}
