"""What is tested of GEMM-AllReduce alone, over real processes: the kernels in the interpreter,
memory in /dev/shm."""

from __future__ import annotations

from tests.distributed import gemm_ar_ranks
from tests.distributed.gemm_ar_calls import ALGORITHMS, TILED


def test_any_number_of_rows(spawn_ranks):
    counts = spawn_ranks(3, gemm_ar_ranks.every_size, 3)
    assert counts == [8 * len(TILED)] * 3


def test_every_rank_has_the_same_bits(spawn_ranks):
    assert spawn_ranks(3, gemm_ar_ranks.same_bits_on_all_ranks) == [2 * len(ALGORITHMS)] * 3


def test_a_result_without_a_copy_outlives_the_next_call(spawn_ranks):
    assert spawn_ranks(3, gemm_ar_ranks.borrowed_results) == [7] * 3


def test_whole_products_take_turns_with_tiles(spawn_ranks):
    assert spawn_ranks(3, gemm_ar_ranks.whole_alternating, 6) == [18] * 3


def test_what_is_too_large_for_one_shot_is_said(spawn_ranks):
    for message in spawn_ranks(2, gemm_ar_ranks.too_large_for_one_shot):
        assert message.startswith("gemm_ar: algorithm is 'one_shot', expected ")
        assert "M above 2" in message


def test_what_is_too_large_for_packets_is_said(spawn_ranks):
    for message in spawn_ranks(2, gemm_ar_ranks.too_large_for_packets):
        assert message.startswith("gemm_ar: algorithm is 'one_shot_in_packets', expected another")
        assert "128" in message
