"""What most tests on GPUs run on."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.gpu.ranks import EVERY, few_ranks
from triton_dist.testing.rank_pool import RankPool

SECONDS = 240

pytest.register_assert_rewrite("tests.gpu.op_suite")


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    if "on_few" in metafunc.fixturenames:
        metafunc.definition.add_marker(few_ranks)


@pytest.fixture(scope="session")
def _pools():
    """Ranks that stay from test to test, by how many: kernels are loaded once for all tests."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def on_ranks(_pools):
    """``on_ranks(num_ranks)``: a function ``run(fn, *args, env={})`` that returns what ``fn`` does,
    by rank."""

    def run(num_ranks: int, fn, *args, env=None):
        pool = _pools.setdefault(num_ranks, RankPool(num_ranks, device="cuda", share_gpus=True))
        pool.env = env or {}
        return pool.run(fn, *args, timeout=SECONDS)

    return lambda num_ranks: functools.partial(run, num_ranks)


@pytest.fixture(params=EVERY)
def num_ranks(request):
    """Ranks, one per GPU where there are so many, else several on each. ``few_ranks`` before a test
    limits them where they share."""
    return request.param


@pytest.fixture
def on_gpus(on_ranks, num_ranks):
    """``on_gpus(fn, *args)``: what ``fn`` returns, by rank."""
    return on_ranks(num_ranks)


@pytest.fixture
def on_any(on_gpus):
    """For tests that CPU ranks run too; see tests/distributed/conftest.py."""
    return on_gpus


on_two = on_few = on_all = on_any


@pytest.fixture
def alternate(num_ranks):
    """True if several ranks share a GPU."""
    return torch.cuda.device_count() < num_ranks


@pytest.fixture
def rounds(alternate):
    """``rounds(n)``: ``n``, or a fifth of it where an exchange takes milliseconds because ranks
    share a GPU. ``cpu`` is a number for CPU ranks."""
    return lambda number, cpu=None: -(-number // 5) if alternate else number
