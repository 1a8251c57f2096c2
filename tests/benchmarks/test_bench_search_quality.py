"""Quality of searches on the excerpts of recorded spaces in benchmarks/data."""

from __future__ import annotations

import gzip
import json
import math
import random
import shutil

import numpy as np
import pytest

from benchmarks import bench_search_quality as quality

CLOCKS = ("steady", "step", "walk", "all")


@pytest.fixture(scope="module")
def racing():
    arguments = ["racing", "--draws", "8", "--configs", "200", "--clocks", *CLOCKS]
    rows = quality.main(arguments)["racing"]
    return {(row["space"], row["clocks"], row["decision"]): row for row in rows}


@pytest.mark.parametrize("clocks", CLOCKS)
@pytest.mark.parametrize(
    ("space", "most"), [("convolution_A100", 0.16), ("dedispersion_A100", 0.28)]
)
def test_racing_finds_the_best_whatever_the_clocks_do(racing, space, most, clocks):
    found, usual, oracle = (racing[space, clocks, name] for name in quality.STRATEGIES)
    assert found["near"] >= min(0.95, oracle["near"])
    assert found["regret p95"] <= max(usual["regret p95"], oracle["regret p95"], 0.005)
    assert found["cost"] <= most
    assert usual["cost"] == pytest.approx(1.0)


def test_changing_clocks_mislead_the_usual_procedure(racing):
    """Otherwise the test above would show nothing."""
    near = [racing["dedispersion_A100", clocks, "5 + 10"]["near"] for clocks in CLOCKS]
    assert near[0] == 1.0
    assert min(near) < 0.7


@pytest.mark.parametrize("name", [*quality.SLOWDOWN_OVER_TIME, *quality.SLOWDOWN_OF_RUNS])
def test_a_clock_changes_by_its_amplitude(name):
    at = np.linspace(0.0, 1.25, 10_000)
    low, high = (0.0, 2.0) if name == "tails" else (-0.05, 0.05)
    for seed in range(20):
        added = {**quality.SLOWDOWN_OVER_TIME, **quality.SLOWDOWN_OF_RUNS}[name](
            np.random.default_rng(seed), at
        )
        assert low - 1e-9 <= added.min() <= added.max() <= high + 1e-9
        if name == "tails":
            assert 0.03 < (added >= 0.2).mean() == (added > 0).mean() < 0.07
        if name in ("modes", "coin"):
            assert set(np.abs(added)) == {0.03}


def test_near_is_the_interval_of_the_median():
    """The 10th to the 23rd of 32 runs hold the median with a probability of 95 %."""
    runs = 100.0 + (np.arange(32) - 15.5) * 0.63
    space = quality.Space("made", (), np.array([runs, runs * 1.2]))
    assert space.near == pytest.approx(6.5 * 0.63 / 100)
    assert space.regrets == pytest.approx([0.0, 0.2])


def test_surrogate_comes_nearer_than_chance(tmp_path):
    shutil.copy(quality.DATA / "convolution_A100_T4.json.gz", tmp_path)
    path = tmp_path / "few.json"
    options = ["--draws", "1", "--tries", "60", "--folder", str(tmp_path), "--json", str(path)]
    found = {row["search"]: row["mean"] for row in quality.main(["few", *options])["few"]}
    assert found["surrogate"] < found["random"]
    assert (
        found.items()
        >= {r["search"]: r["mean"] for r in json.loads(path.read_text())["few"]}.items()
    )


def waves(M: int, tile: tuple[int, int]) -> float:
    """Waves of a GEMM of M rows on 132 multiprocessors."""
    return math.ceil(M / tile[0]) * math.ceil(8192 / tile[1]) / 132


def milliseconds(M: int, tile: tuple[int, int]) -> float:
    m, n = tile
    return math.ceil(waves(M, tile)) * m * n * (1 + 40 / m + 60 / n) / 5e5


def test_a_warm_start_costs_a_part_and_finds_nearly_as_much(tmp_path):
    sizes = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
    tiles = [(m, n) for m in (16, 32, 64, 128, 256) for n in (32, 64, 128, 256, 512)]
    draw = random.Random(1)
    runs = {
        str(M): {
            str(at): [milliseconds(M, tile) * draw.gauss(1.0, 0.003) for _ in range(16)]
            for at, tile in enumerate(tiles)
        }
        for M in sizes
    }
    runs["320"]["3"] = "CompilationError"
    tree = {
        "op": "matmul", "largest": "2048x8192x8192", "ranks": 1, "fallback": [7],
        "configs": [str(tile) for tile in tiles], "sizes": runs,
        "waves": {str(M): [waves(M, tile) for tile in tiles] for M in sizes},
    }  # fmt: skip
    path = tmp_path / "matmul_sizes.json.gz"
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    shutil.copy(quality.DATA / "matmul_8192_28672_sizes.json.gz", tmp_path)
    rows = quality.main(["warm-start", "--draws", "3", "--folder", str(tmp_path)])["warm-start"]
    made, recorded_spaces = rows[:3], rows[3:]
    if "2048x8192x8192" not in made[0]["space"]:
        made, recorded_spaces = recorded_spaces, made
    for full, warm, blind in (made, recorded_spaces):
        assert full["near"] >= 0.95
        assert full["cost"] == 1.0
        assert warm["near"] >= 0.95
        assert warm["regret p95"] < 0.01
        assert warm["cost"] < 0.2
        assert blind["near"] < warm["near"]  # waves change with M
        assert blind["regret p95"] > warm["regret p95"]


def test_matmul_is_tuned_by_both_searches_and_timed(monkeypatch):
    for name in ("TRITON_CACHE_DIR", "TRITON_DIST_CACHE_DIR", "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE"):
        monkeypatch.setenv(name, "")  # to be put back
    rows = quality.main(["matmul", "--shape", "64", "64", "64", "--tries", "3"])["matmul"]
    found = {row["by"]: row for row in rows}
    assert found["surrogate"]["tried"] == 3
    assert all(row["ms"] > 0 for row in found.values())
    assert found["racing"]["winner"]


def test_the_space_for_a_gpu_is_large(monkeypatch):
    class Gpu:
        interprets = False

    monkeypatch.setattr(quality, "current_device", Gpu)
    space = quality.matmul_space()
    assert sum(1 for _ in space) >= 5000
    assert space.default["M"] == 128


def test_a_folder_without_spaces_is_refused(tmp_path):
    with pytest.raises(SystemExit, match=r"no \*_T4.json.gz"):
        quality.main(["racing", "--folder", str(tmp_path)])


def test_predictions_make_races_cheaper_and_wrong_ones_do_no_harm(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(quality.HERE)
    name = "matmul_4096_14336_sizes.json.gz"
    tree = json.loads(gzip.decompress((quality.DATA / name).read_bytes()))
    tree["sizes"] = {M: tree["sizes"][M] for M in ("128", "2048")}
    (tmp_path / name).write_bytes(gzip.compress(json.dumps(tree).encode()))
    rows = quality.main(["prior", "--folder", str(tmp_path), "--draws", "2"])["prior"]
    cost = {row["tuned by"]: row["cost"] for row in rows}
    assert cost['search="prior"'] < cost["with predictions"] < 0.75
    assert cost["race"] == 1
    assert cost["reversed"] > 0.9
    assert [row["near"] for row in rows] == [1.0] * 4
