"""``report``: a tuning as pictures."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from triton_dist import _files
from triton_dist._tuning.store import events_of
from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, Changes
from triton_dist.cli import cache, diff, show
from triton_dist.cli.verb import add_verb, counted
from triton_dist.errors import MissingExtra


def add_to(verbs: Any) -> None:
    parser = add_verb(
        verbs,
        "report",
        _run,
        help="a tuning as pictures: HTML and PNG",
        description="Writes report.html, which needs no network, and report.png about one record: "
        "all times sorted, how the tuning converged, the finalists' samples, which parameters "
        "matter, what it costs to fix a value, what failed, and what changed since another "
        "record. Needs matplotlib, the extra `report`.",
        examples=[
            "report matmul --key 8192 --out matmul-report",
            "report matmul --against old.json --out matmul-report",
        ],
    )
    parser.add_argument("function", metavar="FUNCTION|FILE", help="its name, or a record's file")
    cache.add_choice(parser)
    parser.add_argument("--against", type=Path, metavar="FILE", help="an older record")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--json", action="store_true", help="print what it shows, for programs")


def _run(arguments: argparse.Namespace) -> int:
    _check_matplotlib()
    from triton_dist.cli import page, plots

    found = cache.chosen(arguments.function, arguments)
    if not found:
        return cache.say_none(arguments.function, arguments)
    stored = cache.only(arguments.function, found)
    older = None if arguments.against is None else cache.in_file(arguments.against)
    subject = Subject(stored, older)
    picture, document = arguments.out / "report.png", arguments.out / "report.html"
    _files.write(picture, plots.png(subject))
    _files.write(document, page.html(subject).encode())
    if arguments.json:
        tree = {"html": str(document), "png": str(picture), **show.tree(stored)}
        since = {"since": subject.changes and diff.tree(subject.changes)}
        print(json.dumps(tree | since | {"phases": subject.phases}, indent=2))
    else:
        print(f"{document}, {picture}: {counted(len(subject.found.timed), 'config')} measured")
    return 0


def _check_matplotlib() -> None:
    """Raise before anything is written."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra("triton-dist report", "matplotlib", "report") from None


class Answer(NamedTuple):
    """One measurement in the course of a tuning."""

    seconds: float
    """Since the tuning began."""
    ms: float


@dataclass(frozen=True)
class Subject:
    """A record to be drawn, and an older one to compare it with."""

    stored: StoredRecord
    older: StoredRecord | None

    @cached_property
    def found(self) -> Analysis:
        return Analysis(self.stored.record)

    @cached_property
    def changes(self) -> Changes | None:
        return self.older and Changes.of(self.older.record, self.stored.record)

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """In their order; empty if the log is gone, or the record shipped."""
        found: list[Answer] = []
        for event in self._events:
            with suppress(KeyError, TypeError, ValueError):
                if event["event"] == "outcome" and "samples" in event:
                    passed = _time(event) - _time(self._events[0])
                    found.append(Answer(passed.total_seconds(), float(event["ms"])))
        return found

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by what they were spent on, as far as the log says."""
        phases = self._events[-1].get("phases") if self._events else None
        return phases if isinstance(phases, dict) else {}

    @cached_property
    def _events(self) -> list[dict[str, Any]]:
        record, where = self.stored
        return [] if record.shipped else events_of(Path(where), record.best.digest)


def _time(event: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(event["time"])
