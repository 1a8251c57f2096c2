"""Ops that sum products over ranks, on GPUs: compiled kernels, NVLink; what CPU ranks check, and
graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import pytest

from tests.distributed import gemm_ar_calls, gemm_rs_calls, summed_gemm_ranks
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.fixture(params=[gemm_ar_calls.Calls, gemm_rs_calls.Calls], ids=lambda kind: kind.name)
def kind(request):
    """What there is to know of the op."""
    return request.param


def test_every_way_and_both_kernels(on_gpus, kind, rounds):
    number = rounds(2)
    assert set(on_gpus(summed_gemm_ranks.every_way, kind, number)) == {2 * number * len(kind.ways)}


@few_ranks
def test_row_blocks_in_any_number_of_chunks(on_gpus, kind):
    assert set(on_gpus(summed_gemm_ranks.chunked, kind, 16)) == {48}


@few_ranks
def test_a_kernel_that_raises_leaves_nothing_queued(on_gpus, kind):
    assert set(on_gpus(summed_gemm_ranks.a_kernel_that_raises, kind)) == {6}


@few_ranks
@pytest.mark.parametrize("dtype", summed_gemm_ranks.DTYPES)
def test_every_size_and_layout(on_gpus, kind, dtype):
    assert set(on_gpus(summed_gemm_ranks.every_operand, kind, (dtype,))) == {40}


def test_calls_need_nothing_between_them(on_gpus, kind, rounds):
    number = rounds(60)
    calls = number + number // 3
    assert set(on_gpus(summed_gemm_ranks.back_to_back, kind, number)) == {calls}


@few_ranks
def test_shapes_that_fill_the_gpu(on_gpus, kind, rounds):
    number = rounds(12)
    assert set(on_gpus(summed_gemm_ranks.many_tiles, kind, number)) == {number * len(kind.ways)}


def test_any_rank_may_be_late(on_gpus, kind):
    counts = on_gpus(summed_gemm_ranks.stragglers, kind)
    assert counts == [(len(kind.ways) + 1) * len(counts)] * len(counts)


@few_ranks
@pytest.mark.parametrize("num_holding", [1, 2, 4])
def test_few_multiprocessors_are_enough(on_gpus, kind, num_holding, take_turns):
    """Beside a kernel that holds the others until the op is done."""
    if take_turns and num_holding > 1:
        pytest.skip("one is enough: in its turn a rank has the multiprocessors for itself")
    counts = on_gpus(summed_gemm_ranks.on_few_multiprocessors, kind, 6, num_holding)
    assert set(counts) == {8 * len(kind.ways)}


@few_ranks
def test_the_same_operands_give_the_same_bits(on_gpus, kind, rounds):
    number = rounds(20)
    assert set(on_gpus(summed_gemm_ranks.same_bits, kind, number)) == {number * len(kind.tiled)}


@few_ranks
def test_every_candidate_gives_the_same(on_gpus, kind):
    (count,) = set(on_gpus(summed_gemm_ranks.every_config, kind))
    assert count > kind.fewest_configs


@few_ranks
def test_tuned_over_the_ranks(on_gpus, kind):
    tunings = len(kind.tuned_calls)
    assert set(on_gpus(summed_gemm_ranks.tuned, kind)) == {(tunings, 3 * tunings)}


def test_captured_in_graphs(on_gpus, kind, rounds):
    number = rounds(20)
    assert set(on_gpus(summed_gemm_ranks.replayed, kind, number)) == {2 * number * len(kind.ways)}


def test_epochs_may_wrap_around(on_gpus, kind):
    counts = on_gpus(summed_gemm_ranks.epochs_wrap_around, kind, 4)
    assert set(counts) == {4 * len(kind.epoch_ways)}


def test_only_calls_out_of_turn_look_at_their_peers(on_gpus, kind):
    looks = list(kind.looks)
    assert all(seen == looks for seen in on_gpus(summed_gemm_ranks.looks_at_peers, kind))


def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus, kind):
    first, *others = on_gpus(summed_gemm_ranks.give_up_and_start_again, kind)
    assert first == list(kind.overdue)
    assert others == [[]] * len(others)


@few_ranks
def test_a_bad_call_names_the_argument_and_launches_nothing(on_gpus, kind):
    for seen in on_gpus(summed_gemm_ranks.every_bad_call, kind):
        assert {launched for _, _, launched in seen.values()} == {0}
