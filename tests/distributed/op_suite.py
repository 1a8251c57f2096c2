"""Tests that all ops across ranks share, for CPU ranks and GPUs.

The fixtures ``on_any``, ``on_all``, ``on_two`` and ``on_few`` run a function on ranks; each of the
folders tests/distributed and tests/gpu defines them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.distributed import op_ranks
from tests.distributed.calls import Calls


class OpSuite:
    kind: ClassVar[type[Calls] | Any]

    def test_calls_need_nothing_in_between(self, on_all, rounds):
        number = rounds(60, cpu=9)
        calls = number - (-number // 3)
        assert set(on_all(op_ranks.back_to_back, self.kind, number)) == {calls}

    def test_any_rank_may_be_late(self, on_any, rounds):
        counts = on_any(op_ranks.stragglers, self.kind)
        delays = len(counts) if rounds(1, cpu=0) else 1  # CPU ranks call each algorithm once
        calls = len(self.kind.algorithms) * delays + len(counts)
        assert set(counts) == {calls}

    def test_every_candidate_gives_the_same(self, on_few):
        ((candidates, calls),) = set(on_few(op_ranks.every_config, self.kind))
        assert calls == candidates + 2
        assert candidates >= (self.kind.fewest_configs if torch.cuda.is_available() else 2)

    def test_a_call_that_gave_up_leaves_nothing_behind(self, on_two):
        first, *others = on_two(op_ranks.give_up_and_start_again, self.kind)
        if torch.cuda.is_available() and not self.kind.same_on_gpus:
            assert len(first) == len(self.kind.overdue)
        else:
            assert first == list(self.kind.overdue)
        assert others == [[]] * len(others)


class SlotSuite(OpSuite):
    """Tests of ops with memory in slots, which flags with epochs protect."""

    def test_epochs_may_wrap_around(self, on_all):
        rounds = max(2, 6 // len(self.kind.epoch_algorithms))
        counts = on_all(op_ranks.epochs_wrap_around, self.kind, rounds)
        assert set(counts) == {rounds * len(self.kind.epoch_algorithms)}
