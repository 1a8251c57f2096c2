"""Limits of waits: none in production on GPUs, one while candidates are tried."""

from __future__ import annotations

import pytest

from triton_dist.runtime import waits


def test_kernels_on_gpus_wait_as_long_as_it_takes():
    assert waits.limit_seconds() is None
    assert waits.limit_polls() == 0


def test_limits_nest_and_end(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_WAIT_TIMEOUT", "5")
    assert waits.interpreted_limit_seconds() == 5
    with waits.bounded_waits(7):
        assert waits.interpreted_limit_seconds() == 5
        with waits.bounded_waits(2):
            assert waits.limit_seconds() == 2
            assert waits.interpreted_limit_seconds() == 2
            assert waits.limit_polls() > 0
        assert waits.limit_seconds() == 7
    with pytest.raises(KeyError), waits.bounded_waits(2):
        raise KeyError
    assert waits.limit_seconds() is None


def test_polls_fit_an_int32():
    with waits.bounded_waits(1e9):
        assert waits.limit_polls() == 2**31 - 1
    with waits.bounded_waits(0.5):
        assert 0 < waits.limit_polls() < 2**31 - 1
