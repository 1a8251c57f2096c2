"""Ranks that stay for all tests of layers: starting two costs more than most tests do."""

from __future__ import annotations

import functools

import pytest

# Which config multiplies is not what layers are about: tests of ops try them all.
FIRST_CONFIG = {"TRITON_DIST_AUTOTUNE": "0"}


@pytest.fixture
def on_two_ranks(on_ranks):
    """``on_two_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(on_ranks(2), env=FIRST_CONFIG)


@pytest.fixture
def on_four_ranks(on_ranks):
    """``on_four_ranks(fn, *args)``: what ``fn`` returns, by rank."""
    return functools.partial(on_ranks(4), env=FIRST_CONFIG)
