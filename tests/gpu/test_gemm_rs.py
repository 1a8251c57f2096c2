"""GEMM-ReduceScatter on GPUs: compiled kernels, NVLink; what CPU ranks check, and graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

import functools

import pytest

from tests.distributed import gemm_rs_ranks
from triton_dist.kernels.nvidia.allgather_gemm_tiles import WARP_SPECIALIZED_SPLIT_K_TILES
from triton_dist.kernels.nvidia.gemm import WARP_SPECIALIZED_TILES
from triton_dist.testing import spawn_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(
    params=[pytest.param(count, marks=pytest.mark.gpu(count=count)) for count in (2, 4)]
)
def on_gpus(request):
    """``on_gpus(fn, *args)``: what ``fn`` returns, by rank; one rank per GPU."""
    return functools.partial(spawn_ranks, request.param, device="cuda", timeout=500)


def test_every_way_and_both_kernels(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.every_way)) == {24}


def test_slabs_in_any_number_of_chunks(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.chunked, 16)) == {48}


def test_specialised_warps(on_gpus):
    tiles = len(WARP_SPECIALIZED_TILES) + len(WARP_SPECIALIZED_SPLIT_K_TILES)
    assert all(counts == [5 * tiles] * 3 for counts in on_gpus(gemm_rs_ranks.specialized_warps))


def test_specialised_warps_that_give_up_leave_nothing_behind(on_gpus):
    first, *others = on_gpus(gemm_rs_ranks.specialized_warps_give_up)
    assert [flag[:-1] for flag in first] == ["gemm_rs.arrivals"] * 2
    assert others == [[]] * len(others)


def test_a_kernel_that_raises_leaves_nothing_queued(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.a_kernel_that_raises)) == {3}


@pytest.mark.parametrize("dtype", gemm_rs_ranks.DTYPES)
def test_every_size_and_layout(on_gpus, dtype):
    assert set(on_gpus(gemm_rs_ranks.every_operand, (dtype,))) == {40}


def test_calls_need_nothing_between_them(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.back_to_back, 60)) == {80}


def test_shapes_that_fill_the_gpu(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.many_tiles, 12)) == {36}


def test_any_rank_may_be_late(on_gpus):
    counts = on_gpus(gemm_rs_ranks.stragglers)
    assert counts == [4 * len(counts)] * len(counts)


def test_the_same_operands_give_the_same_bits(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.same_bits, 20)) == {40}


def test_every_candidate_gives_the_same(on_gpus):
    (count,) = set(on_gpus(gemm_rs_ranks.every_config))
    assert count > 20


def test_tuned_over_the_ranks(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.tuned)) == {(2, 6)}


def test_captured_in_graphs(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.replayed, 20)) == {120}


def test_vendor_methods_take_turns_with_ours(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.vendor_in_turn, 6)) == {24}


def test_epochs_may_wrap_around(on_gpus):
    assert set(on_gpus(gemm_rs_ranks.epochs_wrap_around)) == {12}


def test_only_calls_out_of_turn_look_at_their_peers(on_gpus):
    assert all(looks == [1, 0, 0, 1, 1, 0] for looks in on_gpus(gemm_rs_ranks.looks_at_peers))


def test_a_call_that_gave_up_leaves_nothing_behind(on_gpus):
    first, *others = on_gpus(gemm_rs_ranks.give_up_and_start_again)
    assert [flag[:-1] for flag in first] == ["gemm_rs.arrivals"] * 6
    assert others == [[]] * len(others)


def test_a_bad_call_names_the_argument_and_launches_nothing(on_gpus):
    for seen in on_gpus(gemm_rs_ranks.every_bad_call):
        assert {launched for _, _, launched in seen.values()} == {0}
