"""Three products of matrices, checked and timed; on CPU ranks only that they are."""

from __future__ import annotations

import pytest
import torch

from benchmarks import bench_matmul


def test_every_contender_is_checked_and_timed(monkeypatch):
    times = bench_matmul.compare((24, 40, 32), rounds=1)
    assert list(times) == ["matmul", "torch.matmul", "triton.autotune"]
    assert min(times.values()) > 0
    assert bench_matmul.first_result("matmul", (24, 40, 32)) > 0
    monkeypatch.setitem(bench_matmul.CONTENDERS, "wrong", lambda A, B: torch.zeros(24, 40).half())
    with pytest.raises(AssertionError):
        bench_matmul.compare((24, 40, 32), rounds=1)


def test_a_start_that_takes_too_long_is_told():
    assert bench_matmul._seconds(["sleep", "5"], {}, 0.05) == "more than 0 s"
    assert bench_matmul._seconds(["false"], {}, 5) == "failed: []"
