"""Ranks that come to a call with different rows, once the tuner asks nobody any more: each learns
of it, in each way of each op, and the context serves again after a reset."""

from __future__ import annotations

import pytest

from tests.distributed import unequal_rows_ranks
from tests.distributed.unequal_rows_ranks import OPS


@pytest.mark.parametrize("name", list(OPS))
@pytest.mark.parametrize("rows", [(35, 5, 35), (5, 6)], ids=str)
def test_every_rank_learns_who_came_with_what(spawn_ranks, name, rows):
    op, size = OPS[name], len(rows)
    of_a = [each * (1 if op.gathers else size) for each in rows]
    by_rank = spawn_ranks(
        size, unequal_rows_ranks.unequal, name, rows, env={"TRITON_DIST_WAIT_TIMEOUT": "60"}
    )
    for rank, said in enumerate(by_rank):
        assert len(said) == len(op.ways)
        for way, told in zip(op.ways, said, strict=True):
            assert told.get(rank) == of_a[rank], (way, said)
            (other,) = (each for each in told if each != rank)
            # Along a tree a neighbour says so that was told itself.
            if not ("DOUBLE_TREE" in str(way) and size > 2):
                assert 1 in (rank, other), way
                assert told[other] == of_a[other], (way, told)
