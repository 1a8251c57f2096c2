"""Ranks that come to a call with different rows, on GPUs: eager calls and CUDA graphs."""

from __future__ import annotations

import pytest

from tests.distributed import unequal_rows_ranks
from tests.distributed.unequal_rows_ranks import OPS

pytestmark = [pytest.mark.timeout(600), pytest.mark.gpu]


@pytest.mark.parametrize("replays", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", list(OPS))
def test_every_rank_learns_who_came_with_what(on_gpus, name, replays):
    run = unequal_rows_ranks.replayed if replays else unequal_rows_ranks.unequal
    for rank, said in enumerate(on_gpus(run, name, (35, 5, 35, 35))):
        assert len(said) == len(OPS[name].ways)
        assert all(rank in told and len(told) == 2 for told in said)
