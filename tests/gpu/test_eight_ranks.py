"""Eight ranks, on as many GPUs as there are: trees of three levels, and flags of seven peers."""

from __future__ import annotations

import pytest

from tests.distributed import ag_gemm_ranks, collective_ranks, gemm_ar_calls, gemm_rs_calls
from tests.distributed import summed_gemm_ranks as summed
from tests.distributed.collective_calls import OPS

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]
SUMMED = pytest.mark.parametrize(
    "kind", [gemm_ar_calls.Calls, gemm_rs_calls.Calls], ids=lambda kind: kind.name
)


@pytest.fixture
def on_eight(on_ranks):
    """``on_eight(fn, *args)``: what ``fn`` returns on each of eight ranks."""
    return on_ranks(8)


def test_every_schedule_of_the_all_gather(on_eight):
    assert on_eight(ag_gemm_ranks.every_schedule) == [16] * 8


@SUMMED
def test_every_way_of_the_sums(on_eight, kind):
    assert on_eight(summed.every_algorithm, kind, 1) == [2 * len(kind.algorithms)] * 8


@pytest.mark.parametrize("op", list(OPS))
def test_collectives_back_to_back(on_eight, op):
    assert on_eight(collective_ranks.back_to_back, op, 30) == [30 + 10 + 6] * 8


@pytest.mark.parametrize("op", list(OPS))
def test_collectives_captured_in_graphs(on_eight, op):
    algorithms = len(collective_ranks.ALGORITHMS[op])
    assert on_eight(collective_ranks.replayed, op, 3) == [3 * 2 * algorithms + 3] * 8


def test_any_rank_may_be_late(on_eight):
    assert on_eight(ag_gemm_ranks.stragglers) == [6 * 8] * 8
