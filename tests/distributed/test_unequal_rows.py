"""Ranks that come to a call with different rows, once the tuner asks nobody any more: each learns
of it, in each way of each op, and the context serves again after a reset."""

from __future__ import annotations

import pytest

from tests.distributed import unequal_rows_ranks
from tests.distributed.unequal_rows_ranks import OPS
from triton_dist import tune


@pytest.mark.parametrize(
    "options",
    [{"algorithm": "serial", "reduction": "one_shot"}, {"algorithm": "serial"}, {}],
    ids=str,
)
def test_ranks_of_one_range_take_one_kernel(on_two, options):
    rows, limit = (49, 51), {"TRITON_DIST_WAIT_TIMEOUT": "60"}
    assert tune.fine_bucket(rows[0]) == tune.fine_bucket(rows[1])
    told = on_two(unequal_rows_ranks.at_a_threshold, rows, options, env=limit)
    assert told == [dict(enumerate(rows))] * 2


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ag_gemm", (35, 5, 35)),
        ("gemm_ar", (5, 6)),
        ("gemm_rs", (35, 5)),
        ("ag_group_gemm", (5, 6)),
    ],
)
def test_every_rank_learns_who_came_with_what(on_ranks, name, rows):
    op, size = OPS[name], len(rows)
    of_a = [each * (1 if op.gathers else size) for each in rows]
    by_rank = on_ranks(size)(
        unequal_rows_ranks.unequal, name, rows, env={"TRITON_DIST_WAIT_TIMEOUT": "20"}
    )
    for rank, said in enumerate(by_rank):
        assert len(said) == len(op.algorithms)
        for algorithm, told in zip(op.algorithms, said, strict=True):
            assert told.get(rank) == of_a[rank], (algorithm, said)
            (other,) = (each for each in told if each != rank)
            assert 1 in (rank, other), algorithm
            assert told[other] == of_a[other], (algorithm, told)
