"""Ranks that come to a call with different rows, on GPUs: eager calls and CUDA graphs."""

from __future__ import annotations

import pytest

from tests.distributed import unequal_rows_ranks
from tests.distributed.unequal_rows_ranks import OPS
from tests.gpu.ranks import few_ranks

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", list(OPS))
def test_every_rank_learns_who_came_with_what(on_gpus, name, replays):
    run = unequal_rows_ranks.replayed if replays else unequal_rows_ranks.unequal
    check(name, on_gpus(run, name, (35, 5, 35, 35)))


@few_ranks
@pytest.mark.parametrize("name", list(OPS))
def test_calls_queued_behind_end_though_a_peer_makes_none(on_gpus, name, num_ranks):
    check(name, on_gpus(unequal_rows_ranks.queued_behind, name, (35,) * (num_ranks - 1) + (5,)))


def check(name, by_rank):
    for rank, said in enumerate(by_rank):
        assert len(said) == len(OPS[name].algorithms)
        assert all(rank in told and len(told) == 2 for told in said)
