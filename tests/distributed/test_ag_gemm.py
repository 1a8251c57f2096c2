"""AllGather-GEMM over real processes: the kernels in the interpreter, memory in /dev/shm.

Three ranks where their number could matter: a ring, two peers, and no power of two.
"""

from __future__ import annotations

from tests.distributed import ag_gemm_ranks
from triton_dist.kernels.common.gemm.launch import fused_push_candidates, split_k_tiles


def test_every_schedule_and_both_kernels(on_any):
    assert set(on_any(ag_gemm_ranks.every_schedule)) == {16}


def test_every_size_and_layout(on_few, rounds):
    """On CPU ranks in one dtype: tests/kernels/test_gemm.py multiplies the other dtypes."""
    dtypes = ag_gemm_ranks.DTYPES[: rounds(3, cpu=1)]
    assert set(on_few(ag_gemm_ranks.every_operand, dtypes)) == {24 * len(dtypes)}


def test_tiles_that_are_cut_along_k(on_any):
    calls = 4 * len(split_k_tiles())
    assert on_any(ag_gemm_ranks.split_tiles) == [calls] * 3


def test_shards_that_the_consumer_sends_itself(on_any):
    rounds = 1
    calls = rounds * (2 * len(fused_push_candidates()) + 4)
    assert on_any(ag_gemm_ranks.fused_push, rounds) == [calls] * 3


def test_counts_of_parts_are_reset(on_two):
    assert on_two(ag_gemm_ranks.counts_are_reset) == [[0, len(split_k_tiles())]] * 2


def test_what_is_too_large_for_one_launch_is_said(on_two):
    for message in on_two(ag_gemm_ranks.too_many_rows_for_serial):
        assert message.startswith("ag_gemm: algorithm is 'serial', expected another algorithm for")
        assert "M > 10 " in message


def test_a_reset_lets_copies_go_on(on_any):
    assert set(on_any(ag_gemm_ranks.copies_held_up)) == {5}


def test_only_calls_out_of_turn_look_at_their_peers(on_two):
    assert all(looks == ag_gemm_ranks.LOOKS for looks in on_two(ag_gemm_ranks.looks_at_peers))


def test_calls_from_another_thread(on_few):
    assert set(on_few(ag_gemm_ranks.from_another_thread)) == {7}


def test_transfer_and_consumer_apart(on_any):
    on_any(ag_gemm_ranks.consumer_alone)


def test_one_row_with_any_stride(on_few):
    on_few(ag_gemm_ranks.strides_of_one_row)
