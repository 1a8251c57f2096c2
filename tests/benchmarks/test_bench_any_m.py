"""The sweep over sizes that nobody picked: its points, what they amount to, and one run."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.overlap import any_m
from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs
from tests.docs.run_blocks import run_program
from triton_dist.tune import fine_bucket

SCRIPT = str(ROOT / "benchmarks" / "bench_any_m.py")


def test_random_sizes_are_of_all_magnitudes_and_the_seeds():
    sizes = any_m.random_sizes(2000, 16384, seed=3)
    assert sizes == any_m.random_sizes(2000, 16384, seed=3) != any_m.random_sizes(2000, 16384, 4)
    assert min(sizes) == 1
    assert max(sizes) > 15000
    for low, high in ((1, 16), (16, 256), (256, 4096)):  # each a third, or two sevenths
        assert 500 < sum(low <= size < high for size in sizes) < 650


def test_every_bound_has_its_neighbours():
    sizes = any_m.near_bounds(1024, None, seed=0)
    ends = {fine_bucket(n) for n in range(1, 1025)}
    near = {end + step for end in ends for step in (-1, 0, 1, 2)}
    assert set(sizes) == {size for size in near if 1 <= size <= 1024}
    few = set(any_m.near_bounds(1024, 3, seed=0))
    assert 9 <= len(few) <= 12
    assert few <= set(sizes)


def test_the_interval_holds_the_median_as_often_as_it_says():
    draw = random.Random(0)
    held = 0
    for _ in range(1000):
        low, high = any_m.median_interval([draw.gauss(1.0, 0.1) for _ in range(15)])
        held += low <= 1.0 <= high
    assert 950 <= held <= 990


def found(M: int, tuned: float, baseline: float, spread: float = 0.001, **details: object):
    draw = random.Random(M)
    times = {
        name: [ms * draw.uniform(1 - spread, 1 + spread) for _ in range(15)]
        for name, ms in (("tuned", tuned), ("slow baseline", 2 * baseline), ("baseline", baseline))
    }
    details = {"own": True, "config": "{'algorithm': 'x'}", "how": "tuned here", **details}
    return any_m.make_point(M, times, ["slow baseline", "baseline"], **details)


def test_a_point_is_low_only_if_it_surely_is():
    assert found(100, 1.0, 0.99)["best_peer"] == "baseline"
    assert found(100, 1.0, 0.99)["ratio"] == pytest.approx(0.99, abs=2e-3)
    assert any_m.is_slower(found(100, 1.0, 0.95))
    assert not any_m.is_slower(found(100, 1.0, 0.985))
    assert not any_m.is_slower(found(100, 1.0, 0.975, spread=0.05))


def test_the_summary_has_the_worst_and_says_which_are_behind():
    points = [found(30, 1.0, 1.1), found(100, 1.0, 1.04), found(2000, 1.0, 0.9, before=0.89)]
    points[0]["first_call"] = {"host": 70.0, "device": 20.5}
    points[0]["how"] = "warm-started from M=512"
    points += [found(4000, 1.0, 1.0, own=False, regret=0.05), found(5000, 1.0, 1.2, regret=0.01)]
    text = "\n".join(any_m.summary(points))
    assert "512-" in text
    assert "1 warm-started first calls, device time: median 20.5 ms" in text
    assert "M = 2000: 0.9" in text
    assert "slower, in the first pass 0.890" in text
    assert "M = 4000" not in text
    assert "regret at 2 points: median 3.0%, worst 5.0%; at most 3 % at 50% of the points" in text


def test_points_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    points = [found(M, 1.0, 1.1, own=M < 100) for M in (1, 64, 4000)]
    tree = {"op": "ag_gemm", "N": 1, "K": 2, "ranks": 2, "points": points}
    any_m.draw(tree, tmp_path / "any.png")
    assert (tmp_path / "any.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.stress
def test_regret_is_that_against_a_race_of_the_whole_space(spawn_ranks, tmp_path):
    path = tmp_path / "any.json"
    command = ("--op", "gemm_rs", "--M", "3", "--M-random", "0", "--bounds", "0", "--regret", "1")
    env = {"TRITON_DIST_CACHE_DIR": str(tmp_path)}
    few = (run_with_few_configs, {"gemm_rs": 2}, SCRIPT)
    command += ("--rounds", "1", "--json", str(path))
    spawn_ranks(2, *few, *command, init=False, env=env)
    (point,) = json.loads(path.read_text())["points"]
    assert point["regret"] > -1
    assert point["first_call"]["device"] > 3 * point["ms"]["tuned"]


def test_a_run_is_gone_on_with_and_low_points_are_measured_again(spawn_ranks, tmp_path):
    """On CPU ranks every point is low beside gloo."""
    path = tmp_path / "any.json"
    command = (SCRIPT, "--op", "gemm_rs", "--M", "2,4", "--M-random", "0", "--bounds", "0")
    command += ("--most", "4", "--rounds", "1", "--json", str(path), "--dtype", "fp8-block")
    env = {"TRITON_DIST_AUTOTUNE": "0"}
    first, _ = spawn_ranks(2, run_program, *command, init=False, env=env)
    points = {each["M"]: each for each in json.loads(path.read_text())["points"]}
    assert points.keys() == {2, 4}
    assert all(each["failures"] == {} and each["rounds"] == 1 for each in points.values())
    sizes = "N = 32, K = 112, 2 ranks, fp8-block"  # scaled down
    assert f"gemm_rs, llama-70b-gate-up: {sizes}" in first
    spawn_ranks(2, run_program, *command, init=False, env=env)
    assert json.loads(path.read_text())["points"] == list(points.values())  # nothing was left to do
    spawn_ranks(2, run_program, *command, "--again", init=False, env=env)
    again = {each["M"]: each for each in json.loads(path.read_text())["points"]}
    low = [M for M, each in points.items() if each["ratio"] < any_m.MIN_RATIO]
    assert low
    for M in low:
        assert again[M]["rounds"] == 4
        assert again[M]["before"] == points[M]["ratio"]
