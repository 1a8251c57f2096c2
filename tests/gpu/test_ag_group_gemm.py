"""AllGather + grouped GEMM on GPUs: what CPU ranks check, and graphs that serve any routing."""

from __future__ import annotations

import pytest

from tests.distributed import ag_group_gemm_ranks as ranks
from tests.distributed.group_gemm_calls import AllGatherGroupGEMM
from tests.distributed.test_ag_group_gemm import (  # noqa: F401
    test_every_routing_and_way,
    test_every_size_and_layout,
)
from tests.gpu.op_suite import GPUSuite
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


class TestAllGatherGroupGEMM(GPUSuite):
    kind = AllGatherGroupGEMM
    test_captured_in_graphs = None  # test_a_graph_serves_any_routing tests more


def test_a_graph_serves_any_routing(on_gpus, rounds):
    number = rounds(40)
    (count,) = set(on_gpus(ranks.replayed, number))
    assert count >= 5 * number


@few_ranks
def test_a_graph_serves_a_thousand_routings(on_gpus, rounds):
    number = rounds(1000) // 4
    assert set(on_gpus(ranks.replayed, number, ("arrivals",))) == {4 * number}


@few_ranks
def test_ids_that_differ_are_found(on_gpus):
    for differ, _, later in on_gpus(ranks.ids_differ):
        assert differ.startswith("RankDisagreement")
        assert "disagree on the ids of a call of ag_group_gemm" in later
