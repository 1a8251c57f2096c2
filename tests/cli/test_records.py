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
import struct
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from triton_dist import knobs
from triton_dist._archive import Contents, PackedKernel, sha256
from triton_dist._tuning.store import FileStore, events_of
from triton_dist._tuning.store.layout import with_checksum
from triton_dist._tuning.values import (
    Config,
    Failure,
    Fingerprint,
    Key,
    Measurement,
    Origin,
    Outcome,
    Trial,
    TuningRecord,
)
from triton_dist._tuning.values.analysis import Analysis, Changes, parameters
from triton_dist.cli import status, text
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
        Key.of(Origin("gemm", "shop.ops", "(x)"), key, hardware),
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
    assert [found.within(share) for share in (0.01, 0.1001, 5)] == [1, 2, 4]
    (first, block), (second, warps) = found.ranked()
    assert (first, second) == ("block", "warps")
    assert 0.6 < block < 0.8  # all but a little, less what chance explains of four configs
    assert warps == 0
    assert found.price("warps") == pytest.approx({"4": 0, "8": 0.1})
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
    assert changes.facts == ["source: gemm changed"]
    assert not changes.same_winner
    assert changes.older_winner_now == pytest.approx(3 / 1.1)
    assert (len(changes.common), len(changes.gone), changes.new) == (3, 3, [])
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
    assert "  winner of   on [1]   on [2]\n" in out
    assert "        [1]   1.000x   3.000x\n" in out
    assert "        [2]   2.000x   1.000x\n" in out
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
    seen, steps = [], iter(range(4))

    def snapshot():
        return {path: path.read_bytes() for path in begun.parent.iterdir()}

    def step(seconds):
        assert seconds == status._REFRESH_SECONDS
        assert not seen or snapshot() == seen[-1]
        number = next(steps)
        if number == 0:
            fcntl.flock(journal, fcntl.LOCK_EX)
            log.write_text("2030-01-02T03:04:05.000+00:00 [1/3] 2 samples of {'n': 2}\n")
        elif number == 1:
            with begun.open("a") as more:
                more.write(f"{json.dumps(tree)}\n")
        elif number == 2:
            begun.with_suffix(".json").write_bytes(winner)
            begun.unlink()
            monkeypatch.setattr(status, "_IDLE_SECONDS", 0)
        seen.append(snapshot())

    monkeypatch.setattr(status.time, "sleep", step)
    monkeypatch.setattr(text, "is_terminal", lambda: on_terminal)
    if on_terminal:
        monkeypatch.setenv("COLUMNS", "100")
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
    pack.write_bytes(Contents({}, {sha256(b""): kernel}).to_bytes())
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


def test_replay_of_a_record_and_of_a_space(run, tmp_path):
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


NAMED = {"name": "<b> & $x$"}


def big(slower: float = 1.0):
    """A record of 1,000 configs, some of which failed."""
    space = []
    for n in range(1000):
        ms = slower * (1 + n % 10 + (n // 10 % 10) / 10)
        outcome = Failure("launch", "<i>misaligned") if n % 50 == 49 else timed(ms, 1.01 * ms)
        space.append(({"x": n % 10, "y": n // 10 % 10, "z": n // 100} | NAMED, outcome))
    return record(space, key="<b> & $x$", source={"gemm": str(slower)})


class Page(HTMLParser):
    """What a page is made of, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attributes
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:"))
        ]

    def handle_data(self, data):
        self.text += data


def test_a_report_of_a_thousand_configs(run, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, extra report")
    (file,) = kept(big())
    slow = big(2.0)
    (older,) = kept(dataclasses.replace(slow, key=dataclasses.replace(slow.key, text="1")))
    events = [
        {"event": "begin", "time": "2030-01-02T00:00:00+00:00"},
        {"event": "outcome", "time": "2030-01-02T00:00:01+00:00", "ms": 2.0, "samples": [2.0]},
        {"event": "outcome", "time": "2030-01-02T00:00:03+00:00", "ms": 1.0, "samples": [1.0]},
        {
            "event": "winner",
            "config": big().best.digest,
            "phases": {"compile": 2.0, "measure": 1.0, "search": 0.5, "other": 0.5},
        },
    ]
    log = Path(file).with_suffix(".log.jsonl")
    log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    out = tmp_path / "out"
    status, said, err = run("report", file, "--against", older, "--out", str(out), "--json")
    assert (status, err) == (0, "")
    tree = json.loads(said)
    assert tree["phases"] == {"compile": 2.0, "measure": 1.0, "search": 0.5, "other": 0.5}
    assert tree["since"]["ms_old"] == pytest.approx(2 * tree["ms"])
    png = (out / "report.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1120, 1470)  # four rows of two panels
    text = (out / "report.html").read_text()
    assert len(text.encode()) < 400_000
    page = Page(text)
    assert page.fetched == []
    assert (page.tags.count("svg"), page.tags.count("script")) == (7, 1)
    assert not {"b", "i", "link", "img"} & set(page.tags)
    assert "key '<b> & $x$'" in page.text
    assert "<i>misaligned" in page.text
    assert "spent: compile 2, measure 1, search 0.5, other 0.5" in page.text
    assert "the fastest 300 of 980" in page.text


def test_no_axis_of_times_or_ratios_is_negative(run, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, extra report")
    from triton_dist.cli import plots

    scattered = timed(0.05, 1.1, 1.1, 9.0, 40.0)
    kept(record([({"x": 1}, timed(1.0)), ({"x": 2}, scattered), ({"x": 3}, timed(0.0, 1.2, 3.9))]))
    drawn = []
    save = plots.Figure.savefig
    monkeypatch.setattr(
        plots.Figure,
        "savefig",
        lambda figure, *given, **options: (
            drawn.extend(figure.axes),
            save(figure, *given, **options),
        ),
    )
    assert run("report", "gemm", "--out", str(tmp_path))[0] == 0
    titled = {ax.get_title(loc="left"): ax for ax in drawn}
    assert titled["The fastest: all samples"].get_xlim()[0] == 0
    assert len(drawn) == 8, "of the PNG and of the page"
    assert all(ax.get_xlim()[0] >= 0 for ax in drawn)


def test_of_a_log_the_tuning_of_the_record_is_read(tmp_path):
    lines = ["begin", "outcome", "winner a", "begin", "ended", "begin", "winner b", "begin"]
    events = [dict(zip(("event", "config"), line.split(), strict=False)) for line in lines]
    log = "".join(f"{json.dumps(event)}\n" for event in events)
    (tmp_path / "1.log.jsonl").write_text(log + "{cut o")
    assert events_of(tmp_path / "1.json", "a") == events[:3]
    assert events_of(tmp_path / "1.json", "b") == events[5:7]
    assert events_of(tmp_path / "2.json", "a") == []


def test_without_matplotlib_nothing_is_written(run, tmp_path, monkeypatch):
    kept(record())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run("report", "gemm", "--out", str(tmp_path / "out"))
    assert status == 2
    assert "report needs matplotlib, which is not installed. Install it: pip install " in err
    assert not (tmp_path / "out").exists()


def test_one_config_is_a_page_without_pictures(run, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, extra report")
    kept(record([({"x": 1}, timed(1.0))]))
    assert run("report", "gemm", "--out", str(tmp_path))[0] == 0
    assert "svg" not in Page((tmp_path / "report.html").read_text()).tags
    assert (tmp_path / "report.png").exists()
