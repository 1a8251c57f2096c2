"""Ranks that stay for all tests of layers: starting two costs more than most tests do."""

from __future__ import annotations

import functools

import pytest

from triton_dist.testing.rank_pool import RankPool

# Which config multiplies is not what layers are about: tests of ops try them all.
FIRST_CONFIG = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.fixture(scope="package")
def _two_ranks():
    with RankPool(2, FIRST_CONFIG) as pool:
        yield pool


@pytest.fixture
def on_two_ranks(_two_ranks):
    """``on_two_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(_two_ranks.run, timeout=200)


@pytest.fixture(scope="package")
def _four_ranks():
    with RankPool(4, FIRST_CONFIG) as pool:
        yield pool


@pytest.fixture
def on_four_ranks(_four_ranks):
    """``on_four_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(_four_ranks.run, timeout=300)
