"""Tuning ``matmul`` by a model and by racing: on a CPU it shows that it runs."""

from __future__ import annotations

import json

from benchmarks import bench_big_space


def test_both_are_tuned_and_timed(tmp_path, monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_DIST_CACHE_DIR", "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE"):
        monkeypatch.setenv(name, "")  # to be put back
    path = tmp_path / "big.json"
    (found,) = bench_big_space.main(
        ["--shape", "64", "64", "64", "--tries", "3", "--json", str(path)]
    )
    assert (found["configs"], found["surrogate"]["tried"]) == (8, 3)
    assert all(found[name]["ms"] > 0 for name in ("surrogate", "racing", "torch.matmul"))
    assert json.loads(path.read_text())["results"][0]["racing"]["winner"]


def test_the_space_for_a_gpu_is_large(monkeypatch):
    class Gpu:
        interprets = False

    monkeypatch.setattr(bench_big_space, "current_device", Gpu)
    space = bench_big_space.space()
    assert sum(1 for _ in space) >= 5000
    assert space.default["M"] == 128
