"""The benchmark of the plain collectives: on CPU ranks, from the command to the table and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.architecture.source import ROOT

pytestmark = pytest.mark.timeout(180)
SCRIPT = str(ROOT / "benchmarks" / "bench_collectives.py")
PEERS = {"library"}
OWN = {
    "all_reduce": {"one_shot 1", "two_shot 1"},
    "reduce_scatter": {"push 1"},
    "all_gather": {"push 1"},
}


def run(*command, **variables):
    unwanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TRITON_INTERPRET")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment = kept | {"PYTHON": sys.executable, "TRITON_DIST_DEVICE": "cpu"} | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on two ranks, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("collectives")
    path = folder / "collectives.json"
    done = run(
        "bash", str(ROOT / "scripts" / "launch.sh"), SCRIPT, "--sizes", "1K,4100",
        "--scale", "1", "--mode", "eager,graph", "--rounds", "2", "--calls", "2",
        "--json", str(path),
        TRITON_DIST_CACHE_DIR=str(folder / "cache"), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done, path


def test_every_peer_and_way_is_there_in_both_modes(finished):
    tree = json.loads(finished[1].read_text())
    assert [(each["op"], each["bytes"]) for each in tree["sizes"]] == [
        (op, nbytes) for op in OWN for nbytes in (1024, 4100)
    ]
    for size in tree["sizes"]:
        assert size["failures"] == {}
        in_place = {"library, in place"} if size["op"] == "all_reduce" else set()
        wanted = PEERS | in_place | OWN[size["op"]] | {"tuned", "tuned, again"}
        for mode in ("eager", "graph"):
            rows = [row for row in size["rows"] if row["mode"] == mode]
            assert {row["name"] for row in rows} == wanted
            assert all(len(row["milliseconds"]) == 2 for row in rows)


def test_the_tables_say_how_much_faster(finished):
    shown = run(sys.executable, SCRIPT, "--from-json", str(finished[1]), PYTHONPATH="python")
    for text in (finished[0].stdout, shown.stdout):
        for op in OWN:
            assert f"{op}, graph, bfloat16, 2 ranks" in text
        assert "x library" in text
        assert "of 2 calls each" in text


def test_a_size_that_is_none_is_refused():
    refused = run(sys.executable, SCRIPT, "--sizes", "16K,many", PYTHONPATH="python")
    assert refused.returncode == 2
    assert "is not a list of sizes such as 16K,1M" in refused.stderr
