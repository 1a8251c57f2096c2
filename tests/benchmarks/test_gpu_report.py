"""The report of all that is measured on GPUs: steps that end, fail, take too long, and go on."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import gpu_pages
import gpu_report
from gpu_report import CUT_OFF, DONE, FAILED, NOT_REACHED, Step

from triton_dist._archive import PackContents, write


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(gpu_report, "_GRACE_SECONDS", 0.2)


def states(report):
    return {name: step["state"] for name, step in report["steps"].items()}


def test_steps_end_in_every_way_and_go_on(tmp_path):
    steps = [
        Step("good one, really", 1, "echo once >> {out}.runs; echo '{launch}' of it"),
        Step("bad", 1, "echo some; test -e {out}.mended"),
        Step("slow", 0.01, "echo begun; sleep 60 & echo $! > {out}.pid; wait"),
    ]
    begin = time.monotonic()
    first = gpu_report.run(steps, tmp_path, 1, ranks=2)
    assert time.monotonic() - begin < 20
    assert states(first) == {"good one, really": DONE, "bad": FAILED, "slow": CUT_OFF}
    assert first["steps"]["bad"]["status"] == 1
    log = (tmp_path / "good-one-really.log").read_text()
    assert log == "bash scripts/launch.sh --nproc_per_node=2 of it\n"
    pid = int((tmp_path / "slow.pid").read_text())
    assert not (Path("/proc") / str(pid) / "exe").exists()
    assert "begun" in (tmp_path / "report.md").read_text()

    (tmp_path / "bad.mended").touch()
    second = gpu_report.run(steps[:2], tmp_path, 1, ranks=2)
    assert states(second) == {"good one, really": DONE, "bad": DONE, "slow": CUT_OFF}
    assert (tmp_path / "good-one-really.runs").read_text() == "once\n"
    assert json.loads((tmp_path / "report.json").read_text()) == second


def test_what_is_not_reached_is_said(tmp_path):
    steps = [Step("first", 1, "sleep 2"), Step("second", 1, "true")]
    report = gpu_report.run(steps, tmp_path, 0.02, ranks=1)
    assert states(report) == {"first": CUT_OFF, "second": NOT_REACHED}
    assert "| second | not reached |" in (tmp_path / "report.md").read_text()


def test_commands_name_files_that_are_there(capsys):
    assert gpu_report.main(["--list", "--steps", "goals"]) == 0
    assert "goals, run_moe_reduce_ar (4 min): {launch} benchmarks/" in capsys.readouterr().out
    words = {word for step in gpu_report.STEPS for word in step.command.split()}
    files = [word for word in words if word.startswith(("benchmarks/", "tests/", "scripts/"))]
    assert len(files) > 10
    assert [name for name in files if not (gpu_report.ROOT / name).exists()] == []
    assert len({step.file for step in gpu_report.STEPS}) == len(gpu_report.STEPS)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(gpu_report.torch.cuda, "device_count", lambda: 0)
    for arguments, said in (
        ([], "there is no GPU; "),
        (["--steps", "nothing"], "no step has 'nothing'; steps: "),
    ):
        with pytest.raises(SystemExit):
            gpu_report.main(arguments)
        assert said in capsys.readouterr().err


def test_a_page_and_records_come_from_the_folder_alone(tmp_path):
    folder, records = tmp_path / "gpu-report", tmp_path / "records"
    records.mkdir()
    goals, cost, sweep, other = (
        next(step for step in gpu_report.STEPS if step.name == name)
        for name in ("goals, ag_gemm", "host cost", "any M, gemm_rs", "goals, gemm_rs")
    )
    points = [{"M": 5, "ratio": 1.25, "own": True, "how": "tuned", "interval": [1.2, 1.3]}]
    folder.mkdir()
    shutil.copy(ROOT / "docs/explanation/overlap-4-h200.json", folder / f"{goals.file}.json")
    (folder / f"{sweep.file}.json").write_text(json.dumps({"points": points}))
    ends = {goals: "true", cost: "echo 2.97 us", sweep: "true", other: "false"}
    commands = [Step(step.name, 1, command) for step, command in ends.items()]
    gpu_report.run(commands, folder, 1, ranks=4)
    shutil.copy(gpu_pages.RECORDS / "gemm_rs.NVIDIA_H200.json", records)
    shipped = json.loads((records / "gemm_rs.NVIDIA_H200.json").read_text())
    later = copy.deepcopy(shipped)
    del later["groups"][1:], later["groups"][0]["results"][1:]
    later["groups"][0] |= {"date": "2099-01-01"}
    later["groups"][0]["results"][0]["ms"] = 0.123
    packed = PackContents({"gemm_rs.json": json.dumps(later).encode()}, {})
    write(folder / "records-gemm_rs.tdpack", packed)

    page, index = tmp_path / "explanation" / "page.md", tmp_path / "README.md"
    page.parent.mkdir()
    index.write_text("- [Times](explanation/performance.md)\n- [Others](others.md)\n")
    options = ["--page", str(page), "--records", str(records)]
    for _ in range(2):
        assert gpu_pages.main([str(folder), *options]) == 0
    assert index.read_text().splitlines()[1:] == [
        "- [What a GPU report measured](explanation/page.md)",
        "- [Others](others.md)",
    ]
    text = page.read_text()
    for said in (
        "## Goals, ag_gemm\n\nCommit ",
        "| M x N x K | mode | winner | tuned ms |",
        "\n| 8192x28672x8192 | graph | own | 1.269 |",
        "## Host cost",
        "2.97 us",
        "## Any M, gemm_rs",
        "           all       1   1.250",
        "- goals, gemm_rs: failed\n",
        "- stress: not selected\n",
    ):
        assert said in text
    merged = json.loads((records / "gemm_rs.NVIDIA_H200.json").read_text())
    assert "0.123" in json.dumps(merged)
    count = [sum(len(group["results"]) for group in tree["groups"]) for tree in (shipped, merged)]
    assert count[0] == count[1]
