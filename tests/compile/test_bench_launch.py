"""What a launch costs is measured of every contender, and of every level; here of recorded ones."""

from __future__ import annotations

import pytest

from benchmarks import bench_launch
from triton_dist.runner import LEVELS


def test_every_contender_and_level_is_timed(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    found = bench_launch.measure(rounds=1)
    times = found["microseconds"]
    assert list(times)[0] == bench_launch.PLAIN
    assert {"tune.autotune", "runner, cubin_dir", "triton.autotune of cubins"} <= set(times)
    assert list(found["first use, milliseconds"]) == list(LEVELS)
    assert min(times.values()) > 0


def test_a_wrong_result_is_an_error():
    import torch

    class Cuda(torch.Tensor):
        device = torch.device("cuda")

    a, b, c = (torch.ones(4, 4).as_subclass(Cuda) for _ in "abc")
    with pytest.raises(AssertionError, match="does nothing"):
        bench_launch._check({"does nothing": lambda: None}, a, b, c)
