"""Two CPU ranks for all tests of a worker."""

from __future__ import annotations

import pytest

from triton_dist.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def two_ranks():
    """``two_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    with RankPool(2) as pool:
        yield lambda fn, *args: pool.run(fn, *args, timeout=200)
