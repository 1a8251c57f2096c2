"""Ranks that stay for all tests of layers: starting two costs more than most tests do."""

from __future__ import annotations

import contextlib
import functools

import pytest

from triton_dist.testing.rank_pool import RankPool

# Which config multiplies is not what layers are about: tests of ops try them all.
FIRST_CONFIG = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.fixture(scope="package")
def _pools():
    with contextlib.ExitStack() as pools:
        start = functools.cache(lambda size: pools.enter_context(RankPool(size, FIRST_CONFIG)))
        yield start


@pytest.fixture
def on_two_ranks(_pools):
    """``on_two_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(_pools(2).run, timeout=200)


@pytest.fixture
def on_four_ranks(_pools):
    """``on_four_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(_pools(4).run, timeout=300)
