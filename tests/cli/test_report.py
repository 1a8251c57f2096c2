"""``report``: pictures of a tuning."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.made import kept, record, timed
from triton_dist._tuning.store import events_of
from triton_dist._tuning.values import Failure

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
    assert "report needs matplotlib, which is not installed here. Install it: pip install " in err
    assert not (tmp_path / "out").exists()


def test_one_config_is_a_page_without_pictures(run, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, extra report")
    kept(record([({"x": 1}, timed(1.0))]))
    assert run("report", "gemm", "--out", str(tmp_path))[0] == 0
    assert "svg" not in Page((tmp_path / "report.html").read_text()).tags
    assert (tmp_path / "report.png").exists()
