"""Replays of tunings beside tuned sizes, on a space that is made here."""

from __future__ import annotations

import gzip
import json
import math
import random

import pytest

from benchmarks import bench_transfer

SIZES = (256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
TILES = [(m, n) for m in (16, 32, 64, 128, 256) for n in (32, 64, 128, 256, 512)]


def waves(M: int, tile: tuple[int, int]) -> float:
    """Of a GEMM of M rows on 132 multiprocessors."""
    m, n = tile
    return math.ceil(M / m) * math.ceil(8192 / n) / 132


def milliseconds(M: int, tile: tuple[int, int]) -> float:
    """A GEMM whose small tiles are slow."""
    m, n = tile
    return math.ceil(waves(M, tile)) * m * n * (1 + 40 / m + 60 / n) / 5e5


@pytest.fixture(scope="module")
def space(tmp_path_factory):
    draw = random.Random(1)
    sizes = {
        str(M): {
            str(at): [milliseconds(M, tile) * draw.gauss(1.0, 0.003) for _ in range(16)]
            for at, tile in enumerate(TILES)
        }
        for M in SIZES
    }
    sizes["320"]["3"] = "CompilationError: as it would be"
    tree = {
        "op": "matmul", "largest": "2048x8192x8192", "ranks": 1, "safe": [7],
        "configs": [str(tile) for tile in TILES], "sizes": sizes,
        "waves": {str(M): [waves(M, tile) for tile in TILES] for M in SIZES},
    }  # fmt: skip
    path = tmp_path_factory.mktemp("spaces") / "matmul_sizes.json.gz"
    path.write_bytes(gzip.compress(json.dumps(tree).encode()))
    return path


def test_a_transfer_costs_a_part_and_finds_nearly_as_much(space, tmp_path, capsys):
    path = tmp_path / "transfer.json"
    (tree,) = bench_transfer.main([str(space), "--draws", "4", "--json", str(path)])
    assert json.loads(path.read_text()) == [tree]
    assert tree["sizes x draws"] == 4 * 9
    assert tree["race"]["near"] >= 0.95
    assert tree["race"]["cost"] == 1.0
    assert tree["transfer"]["near"] >= 0.95
    assert tree["transfer"]["regret p95"] < 0.01
    assert tree["transfer"]["cost"] < 0.2
    assert tree["blind"]["near"] < tree["transfer"]["near"]  # for waves change with M
    assert tree["blind"]["regret p95"] > tree["transfer"]["regret p95"]
    assert "matmul 2048x8192x8192, 1 GPU, 36 tunings" in capsys.readouterr().out


def test_a_transfer_is_near_on_a_recorded_gpu(capsys):
    (path,) = bench_transfer.DATA.glob("matmul_8192_28672_sizes.json.gz")
    (tree,) = bench_transfer.main([str(path), "--draws", "2"])
    assert tree["transfer"]["near"] >= 0.95
    assert tree["transfer"]["regret p95"] < 0.01
    assert tree["transfer"]["cost"] < 0.2


def test_without_what_neighbours_know_it_is_no_transfer(space):
    """Else the test above would show nothing: any three configs are not enough."""
    read = bench_transfer.Space.read(space)
    regrets = []
    for M in (384, 640, 896, 1280, 1792):
        few = random.Random(M).sample(sorted(read.runs[M], key=str), 3)
        medians = read.medians(M)
        regrets.append(min(medians[config] for config in few) / min(medians.values()) - 1)
    assert max(regrets) > 0.1
