"""What is tested of each op that sums products over ranks, on GPUs: compiled kernels, NVLink; what
CPU ranks check, and graphs.

The functions of the ranks are those of tests/distributed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import summed_gemm_ranks
from tests.gpu.ranks import few_ranks


class SummedGEMM:
    """The tests of one op. Each has a file: those of a file run one after another."""

    kind: Any
    """What there is to know of the op."""

    def test_every_way_and_both_kernels(self, on_gpus, rounds):
        number = rounds(2)
        assert set(on_gpus(summed_gemm_ranks.every_algorithm, self.kind, number)) == {
            2 * number * len(self.kind.algorithms)
        }

    @few_ranks
    def test_row_blocks_in_any_number_of_chunks(self, on_gpus):
        assert set(on_gpus(summed_gemm_ranks.chunked, self.kind, 16)) == {48}

    @few_ranks
    def test_a_kernel_that_raises_leaves_nothing_queued(self, on_gpus):
        assert set(on_gpus(summed_gemm_ranks.a_kernel_that_raises, self.kind)) == {6}

    @few_ranks
    @pytest.mark.parametrize("dtype", summed_gemm_ranks.DTYPES)
    def test_every_size_and_layout(self, on_gpus, dtype):
        assert set(on_gpus(summed_gemm_ranks.every_operand, self.kind, (dtype,))) == {40}

    def test_calls_need_nothing_between_them(self, on_gpus, rounds):
        number = rounds(60)
        calls = number + number // 3
        assert set(on_gpus(summed_gemm_ranks.back_to_back, self.kind, number)) == {calls}

    @few_ranks
    def test_shapes_that_fill_the_gpu(self, on_gpus, rounds):
        number = rounds(12)
        assert set(on_gpus(summed_gemm_ranks.many_tiles, self.kind, number)) == {
            number * len(self.kind.algorithms)
        }

    def test_any_rank_may_be_late(self, on_gpus):
        counts = on_gpus(summed_gemm_ranks.stragglers, self.kind)
        assert counts == [(len(self.kind.algorithms) + 1) * len(counts)] * len(counts)

    @few_ranks
    @pytest.mark.parametrize("num_holding", [1, 2, 4])
    def test_few_multiprocessors_are_enough(self, on_gpus, num_holding, alternate):
        """Beside a kernel that holds the others until the op is done."""
        if alternate and num_holding > 1:
            pytest.skip("one is enough: in its turn a rank has the multiprocessors for itself")
        counts = on_gpus(summed_gemm_ranks.on_few_multiprocessors, self.kind, 6, num_holding)
        assert set(counts) == {8 * len(self.kind.algorithms)}

    @few_ranks
    def test_the_same_operands_give_the_same_bits(self, on_gpus, rounds):
        number = rounds(20)
        assert set(on_gpus(summed_gemm_ranks.same_bits, self.kind, number)) == {
            number * len(self.kind.tiled)
        }

    @few_ranks
    def test_every_candidate_gives_the_same(self, on_gpus):
        (count,) = set(on_gpus(summed_gemm_ranks.every_config, self.kind))
        assert count > self.kind.fewest_configs

    @few_ranks
    def test_tuned_over_the_ranks(self, on_gpus):
        tunings = len(self.kind.tuned_calls)
        assert set(on_gpus(summed_gemm_ranks.tuned, self.kind)) == {(tunings, 3 * tunings)}

    def test_captured_in_graphs(self, on_gpus, rounds):
        number = rounds(20)
        assert set(on_gpus(summed_gemm_ranks.replayed, self.kind, number)) == {
            2 * number * len(self.kind.algorithms)
        }

    def test_epochs_may_wrap_around(self, on_gpus):
        counts = on_gpus(summed_gemm_ranks.epochs_wrap_around, self.kind, 4)
        assert set(counts) == {4 * len(self.kind.epoch_algorithms)}

    def test_only_calls_out_of_turn_look_at_their_peers(self, on_gpus):
        looks = list(self.kind.looks)
        assert all(seen == looks for seen in on_gpus(summed_gemm_ranks.looks_at_peers, self.kind))

    def test_a_call_that_gave_up_leaves_nothing_behind(self, on_gpus):
        first, *others = on_gpus(summed_gemm_ranks.give_up_and_start_again, self.kind)
        assert first == list(self.kind.overdue)
        assert others == [[]] * len(others)
