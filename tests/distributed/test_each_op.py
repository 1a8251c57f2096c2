"""What ops across ranks have in common, over real processes: the kernels in the interpreter, memory
in /dev/shm. The two ops that sum products are in ``test_summed_gemm.py``; errors, contexts and
autograd modes of all ops are in ``test_every_op.py``."""

from __future__ import annotations

import pytest

from tests.distributed import op_ranks
from tests.distributed.collective_calls import AllGather, AllReduce, ReduceScatter
from tests.distributed.gemm_calls import AllGatherGEMM, GEMMAllReduce, GEMMReduceScatter
from tests.distributed.group_gemm_calls import AllGatherGroupGEMM
from tests.distributed.op_suite import OpSuite, SlotSuite


class TestAllReduce(OpSuite):
    kind = AllReduce


class TestReduceScatter(SlotSuite):
    kind = ReduceScatter


class TestAllGather(SlotSuite):
    kind = AllGather


class TestAllGatherGEMM(SlotSuite):
    kind = AllGatherGEMM


class TestAllGatherGroupGEMM(OpSuite):
    kind = AllGatherGroupGEMM
    test_calls_need_nothing_in_between = None  # nor do those of test_any_rank_may_be_late


@pytest.mark.parametrize(
    "kind", [AllReduce, GEMMReduceScatter, AllGatherGroupGEMM], ids=lambda kind: kind.name
)
def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks, kind):
    calls = 3 * len(kind.tuned_calls)
    assert spawn_ranks(2, op_ranks.tuned, kind) == [(kind.tunings, calls)] * 2
    if kind is AllReduce:
        assert spawn_ranks(2, op_ranks.tuned, kind) == [(0, calls)] * 2


def test_disjoint_groups_work_at_the_same_time(on_ranks):
    kinds = [AllReduce, ReduceScatter, AllGatherGEMM, GEMMAllReduce]  # one of each kind of buffer
    run = on_ranks(4)
    assert run(op_ranks.in_groups, kinds, [[0, 2], [1, 3]]) == [12, 16] * 2
    assert run(op_ranks.in_groups, [AllGatherGEMM], [[3, 0], [1, 2]], True) == [3, 4, 4, 3]
    counts = on_ranks(3)(op_ranks.in_groups, [AllGatherGEMM], [[2], [0, 1]])
    assert counts == [4, 4, 3]  # one rank alone next to two
