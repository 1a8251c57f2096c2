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
    """Without tests of code that the ReduceScatter shares."""

    kind = AllGather
    test_calls_need_nothing_in_between = None
    test_any_rank_may_be_late = None
    test_a_call_that_gave_up_leaves_nothing_behind = None
    test_epochs_may_wrap_around = None


class TestAllGatherGEMM(SlotSuite):
    kind = AllGatherGEMM


class TestAllGatherGroupGEMM(OpSuite):
    """Without tests of memory that the AllGather-GEMM shares."""

    kind = AllGatherGroupGEMM
    test_calls_need_nothing_in_between = None  # nor do those of test_any_rank_may_be_late
    test_a_call_that_gave_up_leaves_nothing_behind = None


@pytest.mark.stress
class TestAllOfAllGather(SlotSuite):
    kind = AllGather


@pytest.mark.stress
class TestAllOfAllGatherGroupGEMM(OpSuite):
    kind = AllGatherGroupGEMM
    test_calls_need_nothing_in_between = None  # nor do those of test_any_rank_may_be_late


@pytest.mark.parametrize(
    "kind",
    [
        AllReduce,
        pytest.param(GEMMReduceScatter, marks=pytest.mark.stress),
        pytest.param(AllGatherGroupGEMM, marks=pytest.mark.stress),
    ],
    ids=lambda kind: kind.name,
)
def test_tuned_over_the_ranks_then_taken_from_the_cache(spawn_ranks, kind):
    calls = 3 * len(kind.tuned_calls)
    assert spawn_ranks(2, op_ranks.tuned, kind) == [(kind.tunings, calls)] * 2
    if kind is AllReduce:
        assert spawn_ranks(2, op_ranks.tuned, kind) == [(0, calls)] * 2


def test_disjoint_groups_work_at_the_same_time(on_ranks):
    kinds = [AllReduce, GEMMAllReduce]
    assert on_ranks(4)(op_ranks.in_groups, kinds, [[0, 2], [1, 3]]) == [6, 8] * 2
    counts = on_ranks(3)(op_ranks.in_groups, [AllGatherGEMM], [[2], [1, 0]], True)
    assert counts == [4, 4, 3]  # one rank alone next to two in reverse order
