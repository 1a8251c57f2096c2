"""What most tests on GPUs run on."""

from __future__ import annotations

import functools

import pytest

from triton_dist.testing import spawn_ranks
from triton_dist.testing.rank_pool import RankPool

SECONDS = 500


@pytest.fixture(scope="session")
def _pools():
    """Ranks that stay from test to test, by how many: kernels are loaded once for all tests."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[2, 3, 4])
def num_ranks(request):
    """Ranks, one per GPU where there are so many, else several on each."""
    return request.param


@pytest.fixture
def on_gpus(_pools, num_ranks):
    """``on_gpus(fn, *args)``: what ``fn`` returns, by rank."""
    pool = _pools.setdefault(num_ranks, RankPool(num_ranks, device="cuda", share_gpus=True))
    return functools.partial(pool.run, timeout=SECONDS)


@pytest.fixture
def on_new_gpus(num_ranks):
    """The same on ranks that have tuned nothing yet."""
    return functools.partial(
        spawn_ranks, num_ranks, device="cuda", share_gpus=True, timeout=SECONDS
    )
