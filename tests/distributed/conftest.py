"""CPU ranks for tests that GPUs run too; tests/gpu/conftest.py has the same fixtures."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.distributed.op_suite", "tests.distributed.summed_gemm_suite")


@pytest.fixture
def on_any(on_ranks):
    """Three ranks: a ring, two peers, and not a power of two."""
    return on_ranks(3)


@pytest.fixture
def on_new(on_ranks, _pools):
    """Three ranks without the tunings of earlier tests."""
    if 3 in _pools:
        _pools.pop(3).close()
    return on_ranks(3)


@pytest.fixture
def on_two(on_ranks):
    return on_ranks(2)


on_all = on_two
"""For what GPUs run on every number of ranks."""
on_few = on_two
"""For what hardly depends on the number of ranks."""


@pytest.fixture
def rounds():
    """``rounds(number, cpu)``: a number for GPUs, or a smaller one for CPU ranks."""
    return lambda number, cpu: cpu
