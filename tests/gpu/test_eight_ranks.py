"""Eight ranks, on as many GPUs as there are: flags of seven peers."""

from __future__ import annotations

import pytest

from tests.distributed import ag_gemm_ranks, ep_ranks, op_ranks
from tests.distributed import summed_gemm_ranks as summed
from tests.distributed.collective_calls import COLLECTIVES
from tests.distributed.gemm_calls import AllGatherGEMM, GEMMAllReduce, GEMMReduceScatter

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.fixture
def on_eight(on_ranks):
    """``on_eight(fn, *args)``: what ``fn`` returns on each of eight ranks."""
    return on_ranks(8)


def test_every_schedule_of_the_all_gather(on_eight):
    assert on_eight(ag_gemm_ranks.every_schedule) == [16] * 8


@pytest.mark.parametrize("kind", [GEMMAllReduce, GEMMReduceScatter], ids=lambda kind: kind.name)
def test_every_algorithm_of_the_sums(on_eight, kind):
    assert on_eight(summed.every_algorithm, kind, 1) == [2 * len(kind.algorithms)] * 8


@pytest.mark.parametrize("kind", COLLECTIVES.values(), ids=COLLECTIVES)
def test_collectives_back_to_back_and_in_graphs(on_eight, kind):
    assert on_eight(op_ranks.back_to_back, kind, 30) == [30 + 10] * 8
    assert on_eight(op_ranks.replayed, kind, 3) == [3 * 4 * len(kind.algorithms)] * 8


def test_any_rank_may_be_late(on_eight):
    assert on_eight(op_ranks.stragglers, AllGatherGEMM) == [5 * 8] * 8


def test_expert_parallelism(on_eight):
    # Few kernels to compile: CPU ranks check layouts.
    assert on_eight(ep_ranks.replayed, 7, True) == [21] * 8
    assert on_eight(ep_ranks.stragglers, 50) == [50] * 8
