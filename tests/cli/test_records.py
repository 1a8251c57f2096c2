"""Subcommands that read records: show, diff, compare, status, export, clear and report, on records
with known times."""

from __future__ import annotations

import csv
import dataclasses
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from triton_dist import knobs
from triton_dist._archive import PackContents, PackedKernel, sha256
from triton_dist._tuning.store import FileStore, finished_tunings_in_log
from triton_dist._tuning.store.layout import with_checksum
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    FunctionIdentity,
    Key,
    Measurement,
    Outcome,
    StoredRecord,
    Trial,
    TuningRecord,
)
from triton_dist._tuning.values.analysis import Analysis, Changes, parameters
from triton_dist.cli import status, text
from triton_dist.cli.page import record_page
from triton_dist.cli.plots import figures
from triton_dist.cli.report_data import ReportedRecord
from triton_dist.testing.replay import RecordedSpace
from triton_dist.tune import autotune


def timed(*samples: float) -> Measurement:
    return Measurement(samples, 0)


SPACE = [
    ({"block": 64, "warps": 4}, timed(1.0, 1.0, 1.02)),
    ({"block": 128, "warps": 4}, timed(2.0, 2.0, 2.0)),
    ({"block": 64, "warps": 8}, timed(1.1, 1.1, 1.1)),
    ({"block": 128, "warps": 8}, timed(2.2, 2.2, 2.2)),
    ({"block": 256, "warps": 4}, Failure("resources", "too much shared memory", 1)),
    ({"block": 256, "warps": 8}, Failure("resources", "too much shared memory", 0)),
]


def record(
    space: Sequence[tuple[Mapping[str, object], Outcome]] = SPACE,
    *,
    key: object = 4096,
    ranks: int = 2,
    **fingerprint: object,
) -> TuningRecord:
    hardware = f"cuda, NVIDIA H200, world_size {ranks}"
    about = {
        "hardware": {"gpu": "NVIDIA H200"}, "software": {"triton": "3.6.0"},
        "topology": {"world_size": str(ranks)}, "policy": {}, "source": {"gemm": "1"}, "space": "1",
    }  # fmt: skip
    return TuningRecord(
        Key.of(FunctionIdentity("gemm", "shop.ops", "(x)"), key, hardware),
        Fingerprint(**(about | fingerprint)),
        tuple(Trial.of(Config(values), outcome) for values, outcome in space),
        "2030-01-02T03:04:05+00:00",
        1.5,
    )


def kept(*records: TuningRecord) -> list[str]:
    """The files of ``records``, in the user's cache."""
    store = FileStore(knobs.cache_dir.get())
    return [store.put(each) for each in records]


def test_a_space_is_analysed():
    found = Analysis(record())
    assert [each.ms for each in found.timed] == [1.0, 1.1, 2.0, 2.2]
    assert found.varying == ("block", "warps")
    assert [found.count_within(share) for share in (0.01, 0.1001, 5)] == [1, 2, 4]
    assert found.parameters_by_importance() == [("block", 1.0), ("warps", 0.0)]
    assert found.slowdown_by_value("warps") == pytest.approx({"4": 0, "8": 0.1})
    assert found.always_failed() == [("block", "256", 2)]
    assert [(each.kind, each.count) for each in found.failed] == [("resources", 2)]


def test_a_config_of_triton_is_its_parameters():
    tree = {
        "algorithm": "push",
        "one": {"triton.Config": {"BLOCK": 64}, "num_warps": 4},
        "two": {"triton.Config": {"BLOCK": 32}, "num_stages": 3},
    }
    shown = {
        "algorithm": "'push'",
        "BLOCK": "64",
        "num_warps": "4",
        "two.BLOCK": "32",
        "num_stages": "3",
    }
    assert parameters(tree) == shown


def test_changes_of_two_records():
    slower = [(values, timed(3.0, 3.0)) for values, _ in SPACE[:1]] + SPACE[1:3]
    changes = Changes.of(record(), record(slower, source={"gemm": "2"}))
    assert changes.changed_dependencies == ["source: gemm changed"]
    assert not changes.has_same_winner
    assert changes.older_winner_ratio == pytest.approx(3 / 1.1)
    assert (len(changes.common), len(changes.only_before), changes.only_after) == (3, 3, [])
    assert changes.correlation == pytest.approx(-0.5)


def test_show(run, monkeypatch):
    (file,) = kept(record())
    status, out, _ = run("show", "gemm")
    assert status == 0
    lines = out.splitlines()
    at = lines.index("  time (ms)  to best  spread  samples  config")
    assert lines[at + 1] == "     1.0000   1.000x    1.0%        3  block=64 warps=4  <- winner"
    assert lines[at + 4] == "     2.2000   2.200x    0.0%        3  block=128 warps=8"
    assert "  2 x resources, the first: too much shared memory" in lines
    assert "  always failed: block=256, 2 times" in lines
    assert run("show", file)[1] == out
    assert "2.2000" not in run("show", "gemm", "--top", "2")[1]
    pruned = [({"block": n, "warps": 1}, Failure("pruned", "fits dropped it")) for n in (1, 2, 3)]
    (other,) = kept(record([*SPACE, *pruned], key=1))
    shown = run("show", other, "--top", "2")[1].splitlines()
    at = shown.index("  pruned: {'block': 1, 'warps': 1}, fits dropped it")
    assert shown[at + 1] == "  pruned: {'block': 2, 'warps': 1}, fits dropped it"
    assert shown[at + 2] == "  3 were pruned; --top N names more"
    assert not any("3 x pruned" in line for line in shown)
    Path(other).unlink()
    about, code = run("show", "gemm", "--code")[1].splitlines()
    assert about.startswith("# ")
    assert about.endswith(": 1.0000 ms")
    assert eval(f"dict({code})") == {"config_space": [{"block": 64, "warps": 4}]}
    monkeypatch.setattr(text, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    wrapped = [line for line in run("show", "gemm")[1].splitlines() if file[:20] not in line]
    assert max(map(len, wrapped)) <= 80


def test_diff(run):
    old, other = kept(record(), record(key=8192, source={"gemm": "2"}))
    status, out, _ = run("diff", old, other)
    assert status == 1
    assert "  key: it was 4096, is 8192\n  source: gemm changed\n" in out
    assert "  winner: the same, {'block': 64, 'warps': 4}\n" in out
    assert "facts: no difference" in run("diff", old, old)[1]
    assert run("diff", old, "gemm", "--key", "4096")[0] == 0
    status, _, err = run("diff", old, "gemm")
    assert status == 2
    assert "gemm: 2 records match, but exactly one is required:" in err


def test_compare(run, tmp_path, monkeypatch):
    other = [(values, timed(*([each / 2] * 3))) for (values, _), each in zip(SPACE, (9, 3))]  # noqa: B905
    kept(record(key=(4096, 2)), record(key=(512, 2)), record(other, key=(4096, 4), ranks=4))
    status, out, _ = run("compare", "gemm")
    assert (status, out) == (1, "0 keys of gemm with several records, 3 with one.\n")
    status, out, _ = run("compare", "gemm", "--ranks")
    assert status == 0
    assert "  winner of  on [1]  on [2]\n" in out
    assert "        [1]  1.000x  3.000x\n" in out
    assert "        [2]  2.000x  1.000x\n" in out
    elsewhere = knobs.cache_dir.get()
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "empty"))
    kept(record(other, key=(512, 2)))  # in another folder, so of the same place
    assert "1 key of gemm" in run("compare", "gemm", "--cache", str(elsewhere))[1]


def test_export_as_csv_and_for_others_to_replay(run, tmp_path):
    kept(record())
    rows = [*csv.DictReader(io.StringIO(run("export", "gemm")[1]))]
    assert [row["ms"] for row in rows] == ["1.0", "2.0", "1.1", "2.2", "", ""]
    assert rows[0] | {"block": "64", "warps": "4", "key": "4096"} == rows[0]
    assert rows[4] | {"failure": "resources", "message": "too much shared memory"} == rows[4]
    out = tmp_path / "deep" / "gemm_T4.json"
    assert run("export", "gemm", "--format", "t4", "--out", str(out))[0] == 0
    space = RecordedSpace.read(out)
    assert list(space.configs[0].items()) == [("block", 64), ("warps", 4)]
    assert space.runs[space.configs[0].digest] == (1.0, 1.0, 1.02)
    assert space.runs[space.configs[4].digest].kind == "pruned"


@autotune([{"n": 1}, {"n": 2}, {"n": 3}], key_fn=lambda x: x)
def stopped(x, n):
    if n == 2 and x > 1:
        raise KeyboardInterrupt
    return x


@pytest.fixture
def begun():
    """One record, and the journal of a tuning that was interrupted."""
    stopped.clear()
    stopped(1)
    with pytest.raises(KeyboardInterrupt):
        stopped(64)
    (journal,) = knobs.cache_dir.get().rglob("*.journal")
    return journal


def test_status(run, begun):
    status, out, _ = run("status", "stopped")
    assert status == 0
    assert f"{__name__}.stopped, key 64\n" in out
    assert "    interrupted, 1 of 3 configs tried in " in out
    with begun.open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        (tuning,) = json.loads(run("status", "--json")[1])["tunings"]
    assert (tuning["going_on"], tuning["tried"], tuning["candidates"]) == (True, 1, 3)
    assert tuning["best_ms"] >= 0
    assert run("status", "absent")[0] == 1


@pytest.mark.parametrize("on_terminal", [False, True])
def test_status_follows_a_tuning_until_it_ends(run, begun, request, monkeypatch, on_terminal):
    """And writes nothing."""
    journal = begun.open()
    request.addfinalizer(journal.close)
    (file,) = begun.parent.glob("*.json")
    winner = file.read_bytes()
    outcome = next(line for line in reversed(begun.read_text().splitlines()) if '"n"' in line)
    tree = json.loads(outcome) | {"n": 1, "config": "b", "samples": [0.00001], "ms": 0.00001}
    log = begun.with_suffix(".rank-1.log")
    seen, steps = [], iter(range(5))

    def snapshot():
        return {path: path.read_bytes() for path in begun.parent.iterdir()}

    def step(seconds):
        assert seconds == status._REFRESH_SECONDS
        assert not seen or snapshot() == seen[-1]
        number = next(steps)
        if number == 0:
            fcntl.flock(journal, fcntl.LOCK_EX)
            log.write_text("2030-01-02T03:04:05.000+00:00 [1/3] 2 samples of {'n': 2}\n")
        elif number == 2:  # after a refresh without news, which prints nothing
            with begun.open("a") as more:
                more.write(f"{json.dumps(tree)}\n")
        elif number == 3:
            begun.with_suffix(".json").write_bytes(winner)
            begun.unlink()
            monkeypatch.setattr(status, "_IDLE_SECONDS", 0)
        seen.append(snapshot())

    monkeypatch.setattr(status.time, "sleep", step)
    monkeypatch.setattr(text, "is_terminal", lambda: on_terminal)
    if on_terminal:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr("rich.console.Console.is_terminal", True)
    ended, out, _ = run("status", "stopped", "--watch")
    assert ended == 0
    out = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", out)
    title = f"{__name__}.stopped, key 64"
    assert out.index("1 of 3 configs tried") < out.index("2 of 3 configs tried in ")
    assert "s, best 0.0000 ms" in out
    assert re.search(r"rank 1, [^;]* ago: \[1/3\] 2 samples of \{'n': 2\}", out)
    assert re.search(rf"{re.escape(title)}: tuned in \d+\.\d s, \d\.\d{{4}} ms, \{{'n': \d\}}", out)
    assert ("Waiting for a tuning" in out) == on_terminal
    assert on_terminal or len(out.splitlines()) == 3
    ended, out, _ = run("status", "stopped", "--watch")
    assert ended == 1
    assert out.endswith(f"No running tuning of stopped in {knobs.cache_dir.get()}.\n")


def test_an_interrupted_tuning_is_listed_and_cleared(run, begun):
    status, out, _ = run("list", "stopped")
    assert status == 0
    assert "    key     64\n    state   interrupted, 1 of 3 configs tried\n" in out
    assert "1 record of 1 function, 1 unfinished tuning in" in out
    assert re.search(r"\n +\d\.\d{4}  unfinished  64, interrupted, 1 of 3 ", run("list")[1])
    (tuning,) = json.loads(run("list", "--json")[1])["interrupted"]
    assert (tuning["function"], tuning["key"]) == (f"{__name__}.stopped", "64")
    status, out, _ = run("clear", f"{__name__}.stopped")
    assert status == 0
    assert "removed 1 record, 1 interrupted tuning, 4 logs of" in out
    files = (path for path in knobs.cache_dir.get().rglob("*") if path.is_file())
    assert not [path for path in files if path.name != ".lock"]


def test_a_tuning_that_goes_on_is_not_cleared(run, begun):
    with begun.open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert f"{begun}: kept, the tuning is running" in run("clear", "--all")[1]
        assert begun.exists()
    assert run("clear", "stopped")[0] == 0
    assert not begun.exists()


def test_clear_of_logs_and_of_what_was_interrupted(run, begun):
    (file,) = begun.parent.glob("*.json")
    dry = json.loads(run("clear", "stopped", "--logs", "--dry-run", "--json")[1])
    assert {each["kind"] for each in dry["removed"]} == {"log"}
    assert all(Path(each["file"]).exists() for each in dry["removed"])
    assert "removed 0 records, 4 logs of stopped" in run("clear", "stopped", "--logs")[1]
    assert sorted(begun.parent.glob("[!.]*")) == sorted([file, begun])
    out = run("clear", "stopped", "--interrupted")[1]
    assert out == f"{begun}\nremoved 0 records, 1 interrupted tuning, 0 logs of stopped\n"
    assert file.exists()


def test_clear_of_stale_records_leaves_those_that_are_used_or_cannot_be_judged(run):
    stopped.clear()
    stopped(0)
    (used,) = knobs.cache_dir.get().rglob("*.json")
    tree = json.loads(used.read_text())
    tree["key"], tree["fingerprint"]["space"] = 1, "another"
    stale = used.with_name(f"{'0' * 32}-0.json")
    stale.write_text(with_checksum(tree))
    contextual = used.with_name(f"{'2' * 32}-0.json")
    contextual.write_text(with_checksum(tree | {"module": ""}))
    tree["fingerprint"]["hardware"]["gpu"] = "NVIDIA H200"
    foreign = used.with_name(f"{'1' * 32}-0.json")
    foreign.write_text(with_checksum(tree))
    (program,) = kept(record())
    status, out, _ = run("clear", "--all", "--stale")
    assert status == 0
    assert f"{foreign}: kept, not compared: it was made on " in out
    assert f"{program}: kept, not compared: it was made on " in out
    assert f"{contextual}: kept, not compared: the record does not name the module" in out
    assert f"{stale}\nremoved 1 record, 0 logs of all functions\n" in out
    assert used.exists()
    assert Path(program).exists()
    assert not stale.exists()


HOSTILE = "\x1b]0;title\x07\x1b[2J\nINJECTED\u202e"


@pytest.mark.parametrize(
    "command", ["show gemm", "export gemm", "list gemm", "explain gemm", "pack show {pack}"]
)
def test_text_of_others_cannot_act_on_a_terminal(run, tmp_path, command):
    kept(
        record(
            [*SPACE, ({"mode": HOSTILE}, Failure("launch", HOSTILE, 0))],
            hardware={"gpu": HOSTILE},
            software={"triton": HOSTILE, "settings": HOSTILE},
            version="1",
        )
    )
    kernel = PackedKernel(HOSTILE, {"target": HOSTILE, "python": HOSTILE}, {"m.so": b"\x7fELF"})
    pack = tmp_path / "hostile.tdpack"
    pack.write_bytes(PackContents({}, {sha256(b""): kernel}).to_bytes())
    _, *printed = run(*command.format(pack=pack).split())
    lines = "".join(printed).split("\n")
    assert [line for line in lines if not line.isprintable() or line.startswith("INJECTED")] == []
    assert any("\\x1b" in line for line in lines)


@pytest.mark.parametrize("command", ["explain gemm", "clear gemm --logs", "clear gemm --stale"])
def test_each_folder_is_listed_once_for_all_records(run, monkeypatch, command):
    kept(*(record(key=key) for key in range(30)))
    listed = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda *folder: listed.append(folder) or listdir(*folder))
    run(*command.split())
    of_records = [folder for folder in listed if str(knobs.cache_dir.get()) in str(folder)]
    assert 0 < len(of_records) < 9


def test_replay_of_a_record_and_of_a_space(run, tmp_path, monkeypatch):
    kept(record())
    status, out, _ = run("replay", "gemm", "--seeds", "2")
    assert status == 0
    assert out.splitlines()[0] == "shop.ops.gemm: 6 configs, 2 orders"
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        [name, "regret", "0.00"] for name in ("racing", "exhaustive", "surrogate")
    ]
    path = tmp_path / "space.json"
    run("export", "gemm", "--format", "t4", "--out", str(path))
    asked = ("replay", str(path), "--search", "surrogate", "--tries", "3", "--seeds", "2", "--json")
    tree = json.loads(run(*asked)[1])
    assert (tree["space"], tree["configs"], tree["scores"][0]["tried"]) == ("space", 6, 3)
    assert run("replay", "nothing")[0] == 1
    (tmp_path / "bad.json.gz").write_bytes(b"")
    assert run("replay", str(tmp_path / "bad.json.gz"))[0] == 2
    with pytest.raises(SystemExit):
        run("replay", "gemm", "--search", "luck")
    monkeypatch.setitem(sys.modules, "optuna", None)
    status, _, err = run("replay", "gemm", "--search", "optuna")
    assert (status, "pip install 'triton-dist-tuner[optuna]'" in err) == (2, True)


@pytest.mark.parametrize("subcommand", ["show", "export"])
def test_none_and_a_file_that_is_no_record(run, tmp_path, subcommand):
    status, out, _ = run(subcommand, "gemm", "--key", "7")
    none = f"No record of gemm, --key '7' in {knobs.cache_dir.get()}."
    assert (status, out) == (1, f"{none} All records: triton-dist list\n")
    (tmp_path / "some.json").write_text("{}")
    status, _, err = run(subcommand, str(tmp_path / "some.json"))
    assert status == 2
    assert "some.json: the file is not a tuning record, or it is damaged: " in err


def names(tree: object) -> object:
    """The names in a tree of JSON, without what depends on the record."""
    if isinstance(tree, dict):
        free = ("parameters", "importance", "price", "fixed", "software")
        return {name: None if name in free else names(each) for name, each in tree.items()}
    return [names(tree[0])] if isinstance(tree, list) and tree else None


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "show gemm --key 4096",
            "records: always_failed: count parameter value; by_rank configs: config digest ms "
            "parameters samples to_best; dropped failures: count first kind; file fixed function "
            "hardware importance "
            "key ms price pruned seconds settings shipped timestamp winner within_1_percent",
        ),
        (
            "diff gemm gemm --key 4096",
            "common: config digest new old; facts ms_new ms_old new old older_winner_now only_new "
            "only_old rank_correlation same_winner winner_new winner_old",
        ),
        (
            "compare gemm --ranks",
            "keys: function key records: file hardware ms shipped software version winner; "
            "winner_elsewhere",
        ),
    ],
)
def test_names_in_json_stay(run, command, expected):
    kept(record(), record(key=2), record(key=4, ranks=4))

    def written(tree: object) -> str:
        match tree:
            case dict():
                parts = [
                    f"{name}: {written(each[0])};"
                    if isinstance(each, list) and each and isinstance(each[0], dict)
                    else name
                    for name, each in sorted(tree.items())
                ]
                return " ".join(parts)
        return ""

    tree = names(json.loads(run(*command.split(), "--json")[1]))
    assert written(tree).rstrip(";").replace(";;", ";") == expected


class Page(HTMLParser):
    """What a page is made of, what it would fetch, and the JSON that it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self._holds_data = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [value for name, value in attributes if name in ("src", "href")]
        self._holds_data = ("id", "data") in attributes

    def handle_data(self, data):
        if self._holds_data:
            self.tree = json.loads(data)

    def handle_endtag(self, tag):
        self._holds_data = False

    def table(self, title: str) -> tuple[list[str], list[list[object]]]:
        """The names of the columns of a table, and its rows."""
        (table,) = (each for each in self.tree["tables"] if each["title"] == title)
        return [column["name"] for column in table["columns"]], table["rows"]


@pytest.fixture
def plotly(monkeypatch):
    """A package plotly of a few bytes, so that reports do not need the extra."""
    package = types.ModuleType("plotly")
    offline = types.ModuleType("plotly.offline")
    offline.get_plotlyjs = lambda: "var Plotly = null;"
    monkeypatch.setitem(sys.modules, "plotly", package)
    monkeypatch.setitem(sys.modules, "plotly.offline", offline)


def log_of(file: str, *tunings: tuple[float, Config]) -> None:
    """Write the log of a record with a tuning a second, each with the winner and its time."""
    lines = []
    for n, (ms, config) in enumerate(tunings):
        shown = {"config": config.digest, "shown": str(config), "ms": ms}
        lines += [
            {"event": "begin", "reason": f"because {n} <b>", "default": Config(SPACE[1][0]).digest},
            {"event": "outcome", **shown, "ms": 2 * ms, "samples": [2 * ms]},
            {"event": "outcome", **shown, "samples": [ms]},
            {"event": "outcome", **shown, "ms": "none", "samples": []},
            {"event": "winner", **shown, "seconds": 4.0, "phases": PHASES},
        ]
    for second, line in enumerate(lines):
        line["time"] = f"2030-01-02T00:00:{second:02}.000+00:00"
    log = Path(file).with_suffix(".log.jsonl")
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


PHASES = {"compile": 2.0, "measure": 1.0, "agree": 0.25, "search": 0.5, "other": 0.25}


def test_pages_of_records_and_an_index(run, plotly, tmp_path):
    a, b = Config(SPACE[0][0]), Config(SPACE[1][0])
    hardware = {"gpu": "NVIDIA H200", "driver": "570.1"}
    markup = [({"</script><b>": f"<b>{v['block']}"}, outcome) for v, outcome in SPACE[:2]]
    first, *_ = kept(record(hardware=hardware), record(markup, key="</script><b>"), record(key=1))
    log_of(first, (1.2, a), (1.5, b), (1.0, a))
    status, out, err = run("report", "--out", str(tmp_path), "--json")
    assert (status, err) == (0, "")
    pages = json.loads(out)["pages"]
    assert [each["key"] for each in pages] == ["'</script><b>'", "1", "4096"]  # as people sort
    assert (pages[2]["default_ms"], pages[2]["speed_up"]) == (2.0, 2.0)
    assert pages[2]["phases"] == PHASES

    page = Page(Path(pages[2]["html"]).read_text())
    assert page.fetched == ["index.html", "plotly.min.js"]
    assert [(name, value) for name, value, _ in page.tree["cards"]] == [
        ("default config", "2.000 ms"), ("speed-up", "2.00x"), ("winner", "1.000 ms"),
    ]  # fmt: skip
    facts = dict(page.tree["facts"])
    assert (facts["GPU"], facts["driver"]) == ("NVIDIA H200", "570.1")
    assert facts["versions"] == "triton 3.6.0"
    assert facts["samples"] == "12 for 4 configs, 3 to 3 each; 2 configs failed or were pruned"
    columns, rows = page.table("Configs")
    assert columns[-2:] == ["block", "warps"]
    assert rows[0] == [1, 1.0, 1.0, 2.0, 1.0, 3, "winner", 64, 4]
    assert rows[2] == [3, 2.0, 2.0, 1.0, 0.0, 3, "default", 128, 4]
    assert rows[5] == [None, None, None, None, None, 0, "resources", 256, 8]
    _, past = page.table("Tunings of this key")
    assert [(each[1], each[3], each[4]) for each in past] == [
        (1.2, "because 0 <b>", str(a)), (1.5, "because 1 <b>", str(b)),
        (1.0, "because 2 <b>", str(a)),
    ]  # fmt: skip
    figures = {each["title"]: each for each in page.tree["figures"]}
    assert figures["Time spent"]["data"][0]["x"] == [*PHASES.values()]
    assert figures["Time spent"]["text"].startswith("Seconds: compile 2, measure 1, agree 0.25")
    assert figures["Convergence"]["data"][1]["y"] == [2.0, 1.0]
    assert "block matters most. Method: PED-ANOVA" in figures[IMPORTANCE]["text"]
    assert figures["History"]["data"][0]["y"] == pytest.approx([1.0, 1.25, 1 / 1.2])

    index = Page((tmp_path / "index.html").read_text())
    columns, rows = index.table("Records")
    found = dict(zip(columns, rows[2], strict=True))
    assert (found["GPU"], found["default ms"], found["winner ms"]) == ("NVIDIA H200", 2.0, 1.0)
    assert (found["tunings"], found["new winner"]) == (3, "yes")
    assert found["to previous"] == pytest.approx(2 / 3)
    assert [tmp_path / link for link in index.tree["tables"][0]["links"]] == [
        Path(each["html"]) for each in pages
    ]
    assert (tmp_path / "plotly.min.js").read_text() == "var Plotly = null;"

    page = Page(Path(pages[0]["html"]).read_text())
    assert page.tags.count("script") == 3, "no text of a record ended an element"
    assert "b" not in page.tags
    assert page.tree["title"] == "shop.ops.gemm, key '</script><b>'"
    drawn = json.dumps(page.tree["figures"])
    assert "&lt;b&gt;64" in drawn
    assert "<b>" not in drawn, "plotly interprets tags"
    assert run("report", "--out", str(tmp_path), "--key", "7")[0] == 1


IMPORTANCE = "Importance of parameters (PED-ANOVA)"


def test_a_report_in_one_file_against_an_older_record(run, plotly, tmp_path):
    (file,) = kept(record())
    slower = [(values, timed(3.0, 3.0)) for values, _ in SPACE[:1]] + SPACE[1:3]
    (older,) = kept(record(slower, key=2))
    out = tmp_path / "one.html"
    assert run("report", file, "--against", older, "--out", str(out))[0] == 0
    page = Page(out.read_text())
    assert (page.fetched, [*tmp_path.glob("*.*")]) == ([], [out])
    assert "  time of the winner: 1.1000 ms, now 1.0000 ms, 0.909x" in page.tree["changes"]
    (since,) = (each for each in page.tree["figures"] if each["title"] == "Since the older record")
    assert since["data"][0]["x"] == [3.0, 1.1, 2.0]
    status, _, err = run("report", "gemm", "--out", str(out))
    assert status == 2
    assert "2 records match, but exactly one is required" in err


def big() -> ReportedRecord:
    """12,800 configs, each with ten samples, of which one in a hundred failed."""
    failed, measured = Failure("launch", "<i>misaligned"), lambda n: timed(*[1.0 + n / 100] * 10)
    trials = tuple(
        Trial(
            str(n),
            {"algorithm": ["pull", "push"][n % 2], "block": n // 2 % 64, "n": n // 128},
            failed if n % 100 == 99 else measured(n),
        )
        for n in range(12800)
    )
    return ReportedRecord(StoredRecord(dataclasses.replace(record(), trials=trials), "memory"))


def test_a_page_has_every_config_of_a_large_space():
    page = Page(record_page(big(), None))
    columns, rows = page.table("Configs")
    assert (len(rows), columns[-3:]) == (12800, ["algorithm", "block", "n"])
    assert rows[12671][:3] == [12672, 128.98, 128.98]
    assert [row[6] for row in rows].count("launch") == 128
    (figure,) = (each for each in page.tree["figures"] if each["title"] == "All configs, sorted")
    assert (
        sum(len(trace["x"]) for trace in figure["data"] if trace["name"] == "more samples") == 12672
    )


def test_the_default_config_is_found_only_if_it_was_measured():
    def default(*trials: Trial, **parts: object) -> str | None:
        found = dataclasses.replace(record(), trials=trials, **parts)
        subject = ReportedRecord(StoredRecord(found, "memory"))
        return None if subject.default is None else subject.default.trial.digest

    slow, fast = Trial("a", {"x": 1}, timed(2.0)), Trial("b", {"x": 2}, timed(1.0))
    assert default(slow, fast) == "a"
    assert default(Trial("c", {"x": 3}, Failure("launch", "")), slow, fast) is None
    assert default(slow, fast, Trial("c", {"x": 3}, Failure("pruned", "big"))) is None
    assert default(slow, fast, warm_started_from="1 key") is None
    limited = dataclasses.replace(record().fingerprint, policy={"max_trials": "2"})
    assert default(slow, fast, fingerprint=limited) is None


def test_no_axis_of_times_or_ratios_is_negative():
    scattered = timed(0.05, 1.1, 1.1, 9.0, 40.0)
    space = [({"x": 1}, timed(1.0)), ({"x": 2}, scattered), ({"x": 3}, timed(0.0, 1.2, 3.9))]
    one = StoredRecord(record(space), "memory")
    drawn = {each.title: each.layout for each in figures(ReportedRecord(one, one))}
    assert len(drawn) == 5
    assert drawn["The fastest: all samples"]["xaxis"]["range"][0] == 0
    for layout in drawn.values():
        for axis in (layout["xaxis"], layout["yaxis"]):
            assert axis["rangemode"] in ("nonnegative", "tozero")
            assert axis.get("range", [0])[0] >= 0


def test_plotly_knows_every_property_of_the_figures(tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects", reason="needs plotly, extra report")
    (file,) = kept(record())
    log_of(file, (1.5, Config(SPACE[1][0])), (1.0, Config(SPACE[0][0])))
    stored = StoredRecord(record(), file)
    drawn = [*figures(ReportedRecord(stored, stored))]
    assert len(drawn) == 8
    for each in drawn:
        graph_objects.Figure(each.data, each.layout)  # raises ValueError for an unknown property


USE = """<script>
const status = document.querySelector("[role=status]"), input = document.querySelector("input");
const rows = () => document.querySelector("tbody").querySelectorAll("tr:not(.space)");
const seen = [rows().length, status.textContent];
const select = [...document.querySelectorAll("label")].find(
  label => label.textContent.startsWith("algorithm")).querySelector("select");
select.value = "1";
select.dispatchEvent(new Event("change"));
seen.push(status.textContent, dimmed);
document.querySelectorAll("th button")[1].click();
document.querySelectorAll("th button")[1].click();
seen.push(rows()[0].textContent, document.querySelectorAll("th")[1].getAttribute("aria-sort"));
document.querySelector(".scroll").scrollTop = 1e9;
document.querySelector(".scroll").onscroll();
seen.push([...rows()].at(-1).textContent);
input.value = "launch";
input.dispatchEvent(new Event("input"));
seen.push(status.textContent);
document.body.textContent = `seen ${JSON.stringify(seen)} nees`;
</script>"""


def test_a_browser_shows_filters_and_sorts_a_large_table(tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium or google-chrome")
    plotly = """let dimmed = 0; var Plotly = {
        newPlot(place, data) { place.data = data; },
        restyle(place, { selectedpoints: [points] }) { dimmed = Math.max(dimmed, points.length); },
    };"""
    (tmp_path / "page.html").write_text(record_page(big(), plotly) + USE)
    options = "--headless --no-sandbox --disable-gpu --dump-dom"
    found = subprocess.run(
        [browser, *options.split(), f"--user-data-dir={tmp_path}", str(tmp_path / "page.html")],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    seen = json.loads(found.partition("seen ")[2].partition(" nees")[0])
    assert seen[0] < 100, "only rows in sight are in the document"
    assert [each.partition(";")[0] for each in seen[1:3]] == [
        "12800 of 12800 rows", "6400 of 12800 rows",
    ]  # fmt: skip
    assert seen[3] == 6272, "the measured configs of the algorithm are the bright points"
    assert seen[4:6] == ["12671128.970128.9700.0080.010measured'push'6299", "descending"]
    assert seen[6] == "\u2013\u2013\u2013\u2013\u20130launch'push'6399"
    assert seen[7].startswith("128 of 12800 rows")


def test_of_a_log_the_finished_tunings_are_read(tmp_path):
    lines = ["begin", "outcome", "winner a", "begin", "ended", "begin", "winner b", "begin"]
    events = [dict(zip(("event", "config"), line.split(), strict=False)) for line in lines]
    log = "".join(f"{json.dumps(event)}\n" for event in events)
    (tmp_path / "1.log.jsonl").write_text(log + "{cut o")
    assert finished_tunings_in_log(tmp_path / "1.json") == [events[:3], events[5:7]]
    assert finished_tunings_in_log(tmp_path / "2.json") == []


def test_without_plotly_nothing_is_written(run, tmp_path, monkeypatch):
    kept(record())
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    status, _, err = run("report", "gemm", "--out", str(tmp_path / "out"))
    assert status == 2
    assert "report needs plotly, which is not installed. Install it: pip install " in err
    assert not (tmp_path / "out").exists()


def test_one_config_is_a_page_without_plots(run, plotly, tmp_path):
    kept(record([({"x": 1}, timed(0.0))]))
    assert run("report", "gemm", "--out", str(tmp_path / "a.html"))[0] == 0
    page = Page((tmp_path / "a.html").read_text())
    assert page.tree["figures"] == []
    assert page.table("Configs")[1] == [[1, 0.0, 0.0, 0.0, None, 1, "default, winner"]]
