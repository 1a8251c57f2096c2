"""Tests that GEMM-ReduceScatter and GEMM-AllReduce share, for CPU ranks and GPUs; see
``op_suite``."""

from __future__ import annotations

from tests.distributed import summed_gemm_ranks
from tests.distributed.calls import DTYPES
from tests.distributed.op_suite import SlotSuite


class SummedGEMMSuite(SlotSuite):
    def test_every_algorithm_and_both_kernels(self, on_any, rounds):
        number = rounds(2, cpu=1)
        calls = 2 * number * len(self.kind.algorithms)
        assert set(on_any(summed_gemm_ranks.every_algorithm, self.kind, number)) == {calls}

    def test_row_blocks_in_any_number_of_chunks(self, on_all, rounds):
        number = rounds(16, cpu=2)
        assert set(on_all(summed_gemm_ranks.chunked, self.kind, number)) == {3 * number}

    def test_a_kernel_that_raises_leaves_nothing_queued(self, on_few):
        assert set(on_few(summed_gemm_ranks.a_kernel_that_raises, self.kind)) == {6}

    def test_every_size_and_layout(self, on_few, rounds):
        """On CPU ranks in one dtype: tests/kernels/test_gemm.py multiplies the other dtypes."""
        dtypes = DTYPES[: rounds(3, cpu=1)]
        counts = on_few(summed_gemm_ranks.every_operand, self.kind, dtypes)
        assert set(counts) == {32 * len(dtypes)}

    def test_equal_operands_give_equal_bits(self, on_any, rounds):
        number = rounds(20, cpu=1)
        counts = on_any(summed_gemm_ranks.same_bits, self.kind, number)
        assert set(counts) == {number * len(self.kind.tiled)}

    def test_only_calls_out_of_turn_check_their_peers(self, on_two):
        looks = list(self.kind.looks)
        assert all(seen == looks for seen in on_two(summed_gemm_ranks.looks_at_peers, self.kind))
