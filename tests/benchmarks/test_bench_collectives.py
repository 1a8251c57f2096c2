"""The benchmark of the plain collectives: on CPU ranks, up to the table and JSON."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import sys
from contextlib import redirect_stderr

import pytest

from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs
from tests.docs.run_blocks import run_program
from triton_dist.testing import spawn_ranks

SCRIPT = str(ROOT / "benchmarks" / "bench_collectives.py")
BASELINES = {"library"}
OWN = {
    "all_reduce": {"one_shot 1", "two_shot 1"},
    "reduce_scatter": {"push 1"},
    "all_gather": {"push 1"},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a run on two ranks printed, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("collectives")
    path = folder / "collectives.json"
    printed, _ = spawn_ranks(
        2, run_with_few_configs, dict.fromkeys(OWN, 9), SCRIPT, "--sizes", "16388", "--scale", "1",
        "--mode", "eager,graph", "--rounds", "1", "--calls", "2", "--json", str(path),
        init=False, timeout=200, env={"TRITON_DIST_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    return printed, path


def test_every_peer_and_way_is_there_in_both_modes(finished):
    tree = json.loads(finished[1].read_text())
    assert [(each["op"], each["bytes"]) for each in tree["sizes"]] == [(op, 16388) for op in OWN]
    for size in tree["sizes"]:
        assert size["failures"] == {}
        in_place = {"library, in place"} if size["op"] == "all_reduce" else set()
        wanted = BASELINES | in_place | OWN[size["op"]] | {"tuned", "tuned, again"}
        for mode in ("eager", "graph"):
            rows = [row for row in size["rows"] if row["mode"] == mode]
            assert {row["name"] for row in rows} == wanted
            assert all(len(row["milliseconds"]) == 1 for row in rows)


def test_the_tables_say_how_much_faster(finished, tmp_path):
    """A line a size: that of the run, and of another one in a file."""
    printed, path = finished
    tree = json.loads(path.read_text())
    tree["sizes"] += [size | {"bytes": 1027} for size in tree["sizes"]]
    more = tmp_path / "more.json"
    more.write_text(json.dumps(tree))
    (shown,) = spawn_ranks(1, run_program, SCRIPT, "--from-json", str(more), init=False)
    for text in (printed, shown):
        for op in OWN:
            assert f"{op}, graph, bfloat16, 2 ranks" in text
        assert "x library" in text
        assert "of 2 calls each" in text
    for nbytes in (16388, 1027):
        assert len(re.findall(rf"│ +{nbytes} ", shown)) == 2 * len(OWN)  # both modes


def refusal(*arguments):
    """Status of a command that is refused, and what it says."""
    sys.argv = [SCRIPT, *arguments]
    sys.path.insert(0, os.path.dirname(SCRIPT))
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    return ended.value.code, said.getvalue()


def test_a_size_that_is_none_is_refused():
    ((status, said),) = spawn_ranks(1, refusal, "--sizes", "16K,many", init=False)
    assert status == 2
    assert "is not a list of sizes such as 16K,1M" in said
