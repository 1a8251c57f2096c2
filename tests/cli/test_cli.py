"""``python -m triton_dist``: verbs, exit statuses and what is said to whom."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.architecture.source import ROOT
from tests.tuning import ops
from triton_dist.cli import listing
from triton_dist.cli.main import main

A, B = torch.ones(2, 3), torch.ones(3, 4)
OPS = "tests.tuning.ops"


@pytest.fixture(autouse=True)
def _fresh():
    ops.matmul.clear()
    ops.Layer.forward.clear()
    yield
    ops.matmul.clear()
    ops.Layer.forward.clear()


def cache() -> Path:
    return Path(os.environ["TRITON_DIST_CACHE_DIR"])


def test_it_runs_as_a_module_and_imports_the_file_that_is_named(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from triton_dist.tune import autotune\n\n"
        "@autotune([{'n': 1}, {'n': 2}], key_fn=lambda x: x)\n"
        "def scale(x, n):\n    return x * n\n\n"
        "if __name__ == '__main__':\n    scale(3)\n"
    )

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip

    assert python(str(script)).returncode == 0
    explained = python("-m", "triton_dist", "explain", "scale", "--module", "script.py")
    assert explained.returncode == 0, explained.stderr
    assert "\n  used\n" in explained.stdout
    assert f"{script}.scale, key 3\n" in explained.stdout
    script.write_text(script.read_text().replace("x * n", "x / n"))
    explained = python("-m", "triton_dist", "explain", "scale", "--module", "script.py")
    assert explained.returncode == 1
    assert "  not used: source: scale changed, its digest was " in explained.stdout


def test_explain_says_key_winner_date_file_and_that_it_is_used(run):
    record = ops.matmul.tune(A, B)
    status, out, err = run("explain", f"{OPS}:matmul")
    assert (status, err) == (0, "")
    (file,) = cache().rglob("*.json")
    for part in (str(record.key), str(record.best), record.timestamp, str(file), "  used\n"):
        assert part in out
    assert run("explain", "matmul", "--module", OPS)[1] == out


def test_explain_finds_a_method(run):
    ops.Layer(2.0).forward(A)
    assert run("explain", f"{OPS}:Layer.forward")[0] == 0


def test_a_bare_name_lists_and_says_that_nothing_was_compared(run):
    ops.matmul(A, B)
    status, out, _ = run("explain", "matmul")
    assert status == 0
    assert "Nothing was compared" in out
    assert f"explain matmul --module {OPS}" in out
    assert "used" not in out.replace("Nothing was compared", "")


@pytest.mark.parametrize("name", ["matmul", f"{OPS}:matmul"])
def test_without_a_record_the_status_is_1_and_says_where_was_looked(run, name):
    status, out, _ = run("explain", name)
    assert status == 1
    assert f"No record of matmul in {cache()}." in out


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{OPS}:absent", "'tests.tuning.ops' has no 'absent'"),
        (f"{OPS}:Layer.absent", "'Layer' has no 'absent'"),
        (f"{OPS}:key_fn", "it is a function, not a tuned function"),
    ],
)
def test_a_mistake_has_status_2_and_is_said_on_standard_error(run, name, said):
    status, out, err = run("explain", name)
    assert (status, out) == (2, "")
    assert said in err


def test_a_module_that_fails_when_it_is_imported_is_said(run, tmp_path):
    (tmp_path / "broken_ops.py").write_text("1 / 0\n")
    status, _, err = run("explain", "f", "--module", str(tmp_path / "broken_ops.py"))
    assert status == 2
    assert "ZeroDivisionError" in err
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("arguments", [[], ["dance"], ["explain"]])
def test_a_command_that_is_none_has_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_explain_uses_what_a_tuner_would_from_read_only_folders(run, monkeypatch, tmp_path):
    ops.matmul(A, B)
    shipped = tmp_path / "shipped"
    cache().rename(shipped)
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", f"{tmp_path / 'none'}:{shipped}")
    status, out, _ = run("explain", f"{OPS}:matmul")
    assert status == 0
    assert str(shipped) in out
    ops.matmul.clear()
    before = ops.matmul.tuning_count
    ops.matmul(A, B)
    assert ops.matmul.tuning_count == before
    assert not cache().exists()

    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_ALWAYS_TUNE", "1")
    ops.matmul.clear()
    ops.matmul(A, B)
    (own,) = cache().rglob("*.json")
    status, out, _ = run("explain", f"{OPS}:matmul")
    assert f"not used: {own} comes first" in out
    assert "2 record(s) of matmul, 1 used" in out
    assert "TRITON_DIST_AUTOTUNE_ALWAYS_TUNE is set" in out


def test_a_stale_record_of_ones_own_does_not_hide_a_valid_one_that_is_shipped(
    monkeypatch, tmp_path
):
    ops.matmul(A, B)
    shipped = tmp_path / "shipped"
    cache().rename(shipped)
    (good,) = shipped.rglob("*.json")
    tree = json.loads(good.read_text())
    tree["fingerprint"]["source"]["matmul"] = "stale"
    own = cache() / good.relative_to(shipped)
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps(tree))
    monkeypatch.setenv("TRITON_DIST_AUTOTUNE_READONLY_DIRS", str(shipped))
    ops.matmul.clear()
    before = ops.matmul.tuning_count
    ops.matmul(A, B)
    assert ops.matmul.tuning_count == before


def test_a_damaged_file_is_a_warning_without_a_line_of_code(run):
    ops.matmul(A, B)
    (file,) = cache().rglob("*.json")
    file.write_text("{")
    status, _, err = run("list")
    assert status == 0
    assert err.startswith(f"triton_dist: tuning record {file} is not used")
    assert len(err.splitlines()) == 1


def test_list_has_a_line_for_each_record(run):
    assert run("list")[:2] == (0, f"No record of any function in {cache()}.\n")
    ops.matmul(A, B)
    ops.Layer(2.0).forward(A)
    status, out, _ = run("list")
    assert status == 0
    (line,) = (line for line in out.splitlines() if "ops.matmul" in line)
    for part in ("torch.float32", "triton.Config({'BLOCK_SIZE_M': ", " ms ", ".json"):
        assert part in line
    assert "Layer.forward" in out
    assert "Layer.forward" not in run("list", "matmul")[1]
    assert run("list", "absent")[0] == 1


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "now"), (90, "1 min"), (7201, "2 h"), (9e5, "10 d")]
)
def test_an_age_is_shown_in_its_largest_unit(seconds, shown):
    now = datetime.datetime.now(datetime.timezone.utc)
    then = now - datetime.timedelta(seconds=seconds)
    assert listing._age(then.isoformat()) == shown
    assert listing._age("the day before") == listing._age("2030-01-01") == "unknown"


def test_clear_removes_the_records_of_one_function(run):
    ops.matmul(A, B)
    ops.Layer(2.0).forward(A)
    status, out, _ = run("clear", "matmul")
    assert status == 0
    assert "removed 1 record(s) of matmul" in out
    (left,) = cache().rglob("*.json")
    assert left.parent.name == "forward"
    assert run("clear", "matmul")[0] == 1
    assert run("clear", "../forward")[0] == 1
    assert left.exists()
