"""CPU ranks that serve many tests."""

from __future__ import annotations

import functools

import pytest

from triton_dist.testing.rank_pool import RankPool

pytest.register_assert_rewrite("tests.distributed.op_suite", "tests.distributed.summed_gemm_suite")


@pytest.fixture(scope="session")
def _pools():
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools):
    """``on_ranks(num_ranks)``: ``run(fn, *args, env={})`` that returns the results by rank.

    ``fn`` must leave no state behind: the ranks serve other tests too.
    """

    def run(num_ranks, fn, *args, env=None):
        pool = _pools.setdefault(num_ranks, RankPool(num_ranks))
        pool.env = env or {}
        return pool.run(fn, *args, timeout=180.0)

    return lambda num_ranks: functools.partial(run, num_ranks)


@pytest.fixture
def on_any(on_ranks):
    """Three ranks: a ring, two peers, and not a power of two."""
    return on_ranks(3)


@pytest.fixture
def on_two(on_ranks):
    return on_ranks(2)


@pytest.fixture
def on_few(on_ranks):
    """For what hardly depends on the number of ranks."""
    return on_ranks(2)


@pytest.fixture
def rounds():
    """``rounds(number, cpu)``: a number for GPUs, or a smaller one for CPU ranks."""
    return lambda number, cpu: cpu
