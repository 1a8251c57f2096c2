"""What GPUs test of an op in addition to the tests that CPU ranks run too."""

from __future__ import annotations

import pytest

from tests.distributed import op_ranks, summed_gemm_ranks
from tests.distributed.op_suite import OpSuite, SlotSuite
from tests.distributed.summed_gemm_suite import SummedGEMMSuite
from tests.gpu.ranks import few_ranks


class GPUSuite(OpSuite):
    """Each op has a file: tests of a file run one after another."""

    def test_tuned_over_the_ranks(self, on_few):
        calls = 3 * len(self.kind.tuned_calls)
        assert set(on_few(op_ranks.tuned, self.kind)) == {(self.kind.tunings, calls)}

    def test_captured_in_graphs(self, on_any, rounds):
        number = rounds(15)
        calls = number * 4 * len(self.kind.algorithms)
        assert set(on_any(op_ranks.replayed, self.kind, number)) == {calls}


class GPUSlotSuite(GPUSuite, SlotSuite):
    pass


class GPUSummedGEMMSuite(GPUSlotSuite, SummedGEMMSuite):
    @few_ranks
    def test_shapes_that_fill_the_gpu(self, on_gpus, rounds):
        number = rounds(12)
        counts = on_gpus(summed_gemm_ranks.many_tiles, self.kind, number)
        assert set(counts) == {number * len(self.kind.algorithms)}

    @few_ranks
    @pytest.mark.parametrize("num_holding", [1, 2, 4])
    def test_few_multiprocessors_are_enough(self, on_gpus, num_holding, alternate):
        """Another kernel occupies the other multiprocessors until the op is done."""
        if alternate and num_holding > 1:
            pytest.skip("one is enough: in its turn a rank has the multiprocessors for itself")
        counts = on_gpus(summed_gemm_ranks.on_few_multiprocessors, self.kind, 6, num_holding)
        assert set(counts) == {8 * len(self.kind.algorithms)}
