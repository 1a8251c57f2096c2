"""The benchmark of overlapped ops: on CPU ranks, up to the table, JSON and PNG."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import struct
import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.overlap import measuring, plot, shapes, table
from benchmarks.overlap.measuring import measure
from benchmarks.overlap.results import shape_tree
from benchmarks.overlap.shapes import Shape
from benchmarks.overlap.tuned_op import TunedOp
from benchmarks.overlap.workload import TUNED, TUNED_AGAIN, CandidateSelection
from tests.architecture.source import ROOT
from tests.benchmarks.few_configs import run_with_few_configs
from tests.distributed.gemm_calls import default_tiles
from tests.docs.run_blocks import run_program
from triton_dist.testing import spawn_ranks
from triton_dist.testing.opinfo import GEMM_OPINFOS, OPINFOS
from triton_dist.testing.opinfo.base import Baseline, Cost
from triton_dist.testing.opinfo.moe import GroupedShape


class AddOne:
    serial, note, tolerance = "serial", "made up", 1e-3
    cost = Cost(torch.float32, 0, 0, 0, 0)

    def __init__(self) -> None:
        self.x = torch.zeros(4, 4)
        self.recovered = 0
        self.seen: list[float] = []

    def refresh(self) -> None:
        self.x += 1

    def recover(self) -> None:
        dist.barrier()
        self.recovered += 1

    def candidates(self) -> Mapping[str, Baseline]:
        def whole(kind, call: Callable[[], torch.Tensor]) -> Baseline:
            return Baseline(kind, call, lambda: self.x + 1)

        return {
            "GEMM alone": Baseline("gemm", lambda: self.x),
            "transfer alone": Baseline("transfer", lambda: self.x),
            "serial": whole("baseline", lambda: self.x + 1),
            TUNED: whole("library", lambda: self.x + 1),
            "own 1": whole("own", lambda: self.x + 1),
            "unwritten": whole("own", lambda: torch.empty(4, 4)),
            "stale": whole("own", self._stale),
            "another shape": whole("own", lambda: torch.ones(3)),
            "wrong on rank 1": whole("own", lambda: self.x + 1 + 0.5 * dist.get_rank()),
            "raises on rank 1": whole("own", self._raise_on_rank_1),
            TUNED_AGAIN: whole("library", lambda: self.x + 1),
        }

    def _stale(self) -> torch.Tensor:
        """Right for the operands of the first call."""
        self.seen.append(float(self.x[0, 0]))
        return torch.full((4, 4), self.seen[0])

    def _raise_on_rank_1(self) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("too large")
        return self.x + 1


def measured() -> tuple[int, dict]:
    """How often ranks had to recover, and what was measured."""
    workload = AddOne()
    rows, failures = measure(workload, ["eager", "graph"], rounds=3, warmup_rounds=1)
    return workload.recovered, shape_tree(Shape(4, 4, 4), workload, rows, failures, 0.5)


IN_ONE_LAUNCH: dict[str, dict[str, Any]] = {
    "ag_gemm": {"algorithm": "serial"},
    "gemm_ar": {"algorithm": "two_shot_in_one_launch"},
    "gemm_rs": {"algorithm": "one_launch"},
}
"""Of each op a way that counts its calls apart from the op's slots: both must be recovered."""


class OneFails(TunedOp):
    """The same call twice; the first time rank 1 does not make it. Nothing is tuned."""

    def candidates(self) -> Mapping[str, Baseline]:
        good = self._candidate(self._winner)
        return {
            "rank 1 fails": Baseline("own", lambda: self._fail_or(good), good.expected),
            TUNED: good,
        }

    def _fail_or(self, good: Baseline) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("too large")
        return good.call()


def recovered() -> dict[str, tuple[list[str], dict[str, str]]]:
    """By op: the names of right candidates, and the errors of the others."""
    return {op: measured_with_failure(op) for op in IN_ONE_LAUNCH}


def measured_with_failure(op: str) -> tuple[list[str], dict[str, str]]:
    case, dtype = GEMM_OPINFOS[op], torch.float16
    shape = case.shape_from_rank(5, 40, 72, dist.get_world_size())
    config = {"gemm_config": default_tiles(), **IN_ONE_LAUNCH[op]}
    record = SimpleNamespace(seconds=0.0, trials=[], warm_started_from="")
    with (
        mock.patch.object(case.op, "tune", return_value=record),
        mock.patch.object(case.op, "best_config", return_value=config),
        mock.patch.object(measuring, "_STEP_SECONDS", 2.0),
        case.context(shape, dtype) as ctx,
    ):
        workload = OneFails(case, shape, dtype, ctx, CandidateSelection(0))
        rows, failures = measure(workload, ["eager"], rounds=2, warmup_rounds=1)
    return [row.name for row in rows], failures


SCRIPT = str(ROOT / "benchmarks" / "bench_overlap.py")
EXPLANATION = ROOT / "docs" / "explanation"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """What a run on two ranks printed, and the file that it wrote."""
    folder = tmp_path_factory.mktemp("overlap")
    path = folder / "overlap.json"
    printed, _ = spawn_ranks(
        2, run_with_few_configs, {"ag_gemm": 9}, SCRIPT, "--scale", "1",
        "--shapes", "24:64:32,10:32:16", "--mode", "eager,graph", "--rounds", "2", "--best", "2",
        "--json", str(path),
        init=False, timeout=200, env={"TRITON_DIST_CACHE_DIR": str(folder / "cache")},
    )  # fmt: skip
    return printed, path


@pytest.fixture(scope="module")
def tree(finished):
    return json.loads(finished[1].read_text())


def test_every_peer_and_several_configs_are_there_in_both_modes(tree):
    for shape in tree["shapes"]:
        assert shape["failures"] == {}
        for mode in ("eager", "graph"):
            names = {row["name"] for row in shape["rows"] if row["mode"] == mode}
            assert names == {
                "GEMM alone", "all-gather alone", "copy-engine all-gather alone",
                "all-gather + matmul", "tuned", "own 1", "own 2", "tuned, again",
            }  # fmt: skip


def test_numbers_follow_from_the_samples(tree):
    for shape in tree["shapes"]:
        medians = {}
        for row in shape["rows"]:
            assert len(row["milliseconds"]) == 2
            assert row["median"] == statistics.median(row["milliseconds"])
            assert row["p10"] <= row["median"] <= row["p90"]
            medians[row["name"], row["mode"]] = row["median"]
        for mode, summary in shape["modes"].items():
            gathers = ("all-gather alone", "copy-engine all-gather alone")
            fastest = min(medians[name, mode] for name in gathers)
            assert summary["limit"] == max(medians["GEMM alone", mode], fastest)
            assert summary["winner"] == "own"
            own = {name: medians[name, mode] for name in ("tuned", "own 1", "own 2")}
            assert summary["best_own"] == min(own, key=own.__getitem__)


def test_the_file_says_how_it_was_made(tree):
    assert tree["command"][0].endswith("bench_overlap.py")
    assert "--rounds" in tree["command"]
    assert tree["hardware"]["ranks"] == "2"
    assert {"python", "torch", "triton"} <= set(tree["software"])
    assert tree["environment"]["TRITON_INTERPRET"] == "1"
    assert [(s["M"], s["N"], s["K"]) for s in tree["shapes"]] == [(24, 64, 32), (10, 32, 16)]


def test_the_summary_comes_last(finished):
    printed, _ = finished
    assert printed.count("best own: ") == 4
    last = printed[printed.rindex("own / limit") :]
    for line in ("24x64x32  │ eager", "24x64x32  │ graph", "10x32x16  │ eager"):
        assert line in last
    assert "A/A: relative difference of two measurements" in last


def test_a_file_is_shown_and_drawn_alone(finished, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, extra bench")
    png = tmp_path / "overlap.png"
    monkeypatch.setattr(sys, "argv", [])  # both are restored
    monkeypatch.setattr(sys, "path", sys.path[:])
    printed = run_program(SCRIPT, "--from-json", str(finished[1]), "--png", str(png))
    assert png.read_bytes().startswith(PNG)
    assert "own / limit" in printed


def test_without_matplotlib_nothing_is_measured_in_vain(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="--from-json FILE --png FILE"):
        plot.check_matplotlib()


def test_what_is_drawn(tree):
    shape = tree["shapes"][0]
    serial = table.median(shape, "all-gather + matmul", "eager")
    tuned = table.median(shape, "tuned", "eager")
    limit = shape["modes"]["eager"]["limit"]
    assert plot.bar_length(shape, "eager", "tuned", over_limit=False) == serial / tuned
    assert plot.bar_length(shape, "eager", "tuned", over_limit=True) == tuned / limit
    assert plot.bar_length(shape, "eager", "torch async-TP", over_limit=True) is None
    assert plot.series([shape]) == ["tuned", "all-gather + matmul"]


def test_a_picture_is_at_most_twice_as_wide_as_high_and_says_what_is_missing(tree, tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, extra bench")
    failed = copy.deepcopy(tree)
    shape = failed["shapes"][0]
    shape["rows"] = [row for row in shape["rows"] if row["name"] != "tuned"]
    for number, report in enumerate([failed, {**tree, "shapes": tree["shapes"] * 4}]):
        path = tmp_path / f"{number}.png"
        plot.draw(report, path)
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert width <= 2 * height
    assert "none: the candidate failed" in "".join(plot.notes(failed))
    assert "none: the candidate failed" not in "".join(plot.notes(tree))


def test_the_notes_say_whether_there_is_a_spread_and_what_is_below_the_limit():
    def report(tuned, **spread):
        rows = [
            {"name": name, "mode": "eager", "kind": kind, "median": time, **spread}
            for name, kind, time in (("tuned", "own", tuned), ("serial", "baseline", 3.0))
        ]
        shape = {"serial": "serial", "rows": rows, "modes": {"eager": {"limit": 2.0}}}
        return "".join(plot.notes({"rounds": 5, "shapes": [shape]}))

    assert "10th to 90th percentile" in report(2.5, p10=2.4, p90=2.6)
    assert "no percentiles" in report(2.5)
    assert "below 1" in report(1.9)
    assert "below 1" not in report(2.5)


@pytest.mark.parametrize("name", ["overlap", "gemm-rs", "gemm-ar"])
def test_the_numbers_of_the_pictures_in_the_documentation_are_there(name):
    """And each colour means one thing in all of them."""
    report = json.loads((EXPLANATION / f"{name}-4-h200.json").read_text())
    serial = report["shapes"][0]["serial"]
    colours = {each: plot._colour(each, serial) for each in plot.series(report["shapes"])}
    assert len(set(colours.values())) == len(colours) > 2
    assert colours["tuned"] == plot._colour("tuned", "")
    assert colours[serial] == plot._colour("serial", "serial")
    assert (EXPLANATION / f"{name}-4-h200.png").read_bytes().startswith(PNG)
    console = table.console()
    with console.capture() as captured:
        console.print(table.shape_table(report["shapes"][0]), table.summary_table(report))
    assert table.title(report["shapes"][0]) in captured.get()


def test_what_fails_on_some_rank_is_left_out_on_all(spawn_ranks):
    (recovered, tree), (_, other) = spawn_ranks(2, measured)
    assert tree["rows"] == other["rows"]
    good = ["GEMM alone", "transfer alone", "serial", "tuned", "own 1", "tuned, again"]
    assert list(dict.fromkeys(row["name"] for row in tree["rows"])) == good
    reasons = {
        "unwritten": "rank 0: AssertionError: 16 of 16 values are wrong",
        "stale": "rank 0: AssertionError: 16 of 16 values are wrong",
        "another shape": "rank 0: AssertionError: shape (3,), expected (4, 4)",
        "wrong on rank 1": "rank 1: AssertionError: 16 of 16 values are wrong",
        "raises on rank 1": "rank 1: MemoryError: too large",
    }
    assert len(tree["failures"]) == recovered == 2 * len(reasons)
    for name, reason in reasons.items():
        for mode in ("eager", "graph"):
            assert tree["failures"][f"{name}, {mode}"].startswith(reason)
    for summary in tree["modes"].values():
        assert summary["winner"] == "library"
        assert summary["best_own"] == "own 1"
        assert summary["best_peer"] == "serial"


def test_an_op_of_which_a_candidate_failed_is_right_again(spawn_ranks):
    """In a way that counts apart from the op's slots: the whole context is recovered."""
    for measured_ops in spawn_ranks(2, recovered):
        assert list(measured_ops) == list(IN_ONE_LAUNCH)
        for names, failures in measured_ops.values():
            assert list(failures) == ["rank 1 fails, eager"]
            assert names == ["tuned"]


def test_tables_and_ratios_do_without_what_failed():
    row = {"name": "tuned", "kind": "own", "mode": "eager", "config": "", "median": 1.0}
    row |= {"p10": 1.0, "p90": 1.0, "milliseconds": [1.0]}
    tree = {"M": 1, "N": 2, "K": 3, "tuning": "", "seconds": 1.0, "serial": "serial", "rows": [row]}
    tree |= {"failures": {"serial, eager": "broken"}, "modes": {"eager": {"winner": "own"}}}
    report = {"op": "op", "dtype": "d", "rounds": 1, "hardware": {"ranks": "1", "gpu": "g"}}
    console = table.console()
    with console.capture() as captured:
        console.print(table.shape_table(tree))
        console.print(table.summary_table(report | {"shapes": [tree]}))
    assert "broken" in captured.get()
    assert "1x2x3" in captured.get()


def test_shapes_of_the_command_line():
    assert shapes.parse_shapes("1:2:3,4:5:6") == [Shape(1, 2, 3), Shape(4, 5, 6)]
    cases = OPINFOS
    (layer,) = shapes.parse_layers("llama-70b-qkv", cases["ag_gemm"])
    assert layer(64) == Shape(64, 10240, 8192)
    assert len(shapes.parse_layers("all", cases["gemm_rs"])) == len(shapes.LAYERS)
    (layer,) = shapes.parse_layers("Mixtral 8x7B", cases["run_moe_reduce_rs"])
    assert layer(64) == GroupedShape(64, 4096, 14336, 8, 2)
    with pytest.raises(argparse.ArgumentTypeError, match="no layer 'llama-1b'; there are Mixtral"):
        shapes.parse_layers("llama-1b", cases["grouped_gemm"])
    assert shapes.parse_numbers("512,1024") == [512, 1024]
    for parse, text in (
        (shapes.parse_shapes, "1:2"),
        (shapes.parse_shapes, "1:2:x"),
        (shapes.parse_shapes, "0:2:3"),
        (shapes.parse_numbers, "a"),
    ):
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


def test_scaled_shapes_fit_the_ranks():
    assert Shape(8192, 28672, 8192).smaller(256, 4) == Shape(32, 112, 32)
    assert Shape(10, 3, 7).smaller(1, 4) == Shape(8, 4, 7)
    assert Shape(512, 512, 512).smaller(4096, 2) == Shape(2, 2, 1)
    assert Shape(7, 7, 7).smaller(2, 4, returns_all_rows=True) == Shape(3, 4, 3)
