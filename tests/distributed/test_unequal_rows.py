"""Ranks that come to a call with different rows, once the tuner asks nobody any more: each learns of
it, in each way of each op, and the context serves again after a reset."""

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
            other, *_ = [each for each in told if each != rank]
            assert 1 in (rank, other), way
            # A sum along a tree is passed on as one of another number.
            is_told_on = "DOUBLE_TREE" in str(way) and size > 2
            assert told[other] == of_a[other] or is_told_on, (way, told)
