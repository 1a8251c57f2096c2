"""A launch is timed of every contender, and from every level; here they are recorded ones."""

from __future__ import annotations

from benchmarks import bench_launch
from triton_dist.runner import LEVELS


def test_every_contender_and_level_is_timed(monkeypatch):
    monkeypatch.setenv("TRITON_DIST_DEVICE", "cpu")
    found = bench_launch.measure(rounds=1)
    times = found["microseconds"]
    assert next(iter(times)) == bench_launch.PLAIN
    assert {"tune.autotune", "runner, cubin_dir", "triton.autotune of cubins"} <= set(times)
    assert list(found["first use, milliseconds"]) == list(LEVELS)
    assert min(times.values()) > 0
