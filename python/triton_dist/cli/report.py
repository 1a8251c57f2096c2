"""``report``: draw a tuning as HTML and PNG."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from triton_dist import _files
from triton_dist.cli import cache, compare, show
from triton_dist.cli.subcommand import add_subcommand, counted
from triton_dist.errors import MissingExtra


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "report",
        _run,
        help="draw a tuning as HTML and PNG",
        description="Writes report.html (one file, no network needed) and report.png for one "
        "record: all times sorted, convergence of the tuning, samples of the finalists, importance "
        "of each parameter, cost of fixing a value, failures, and changes since an older record. "
        "Requires matplotlib (the extra `report`).",
        examples=[
            "report matmul --key 8192 --out matmul-report",
            "report matmul --against old.json --out matmul-report",
        ],
    )
    cache.add_choice(parser, "FUNCTION|FILE", "function name, or a record's file")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="file of an older record to compare with"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--json", action="store_true", help="print the data as JSON")


def _run(arguments: argparse.Namespace) -> int:
    # Check for matplotlib before anything is written.
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtra("triton-dist report", "matplotlib", "report") from error
    from triton_dist.cli import page, plots

    found = cache.chosen(arguments.function, arguments)
    if not found:
        return cache.say_none(arguments.function, arguments)
    stored = cache.only(arguments.function, found)
    older = None if arguments.against is None else cache.in_file(arguments.against)
    subject = plots.Subject(stored, older)
    picture, document = arguments.out / "report.png", arguments.out / "report.html"
    _files.write(picture, plots.png(subject))
    _files.write(document, page.html(subject).encode())
    if arguments.json:
        tree = {"html": str(document), "png": str(picture), **show.tree(stored)}
        since = {"since": subject.changes and compare.tree_of_changes(subject.changes)}
        print(json.dumps(tree | since | {"phases": subject.phases}, indent=2))
    else:
        print(f"{document}, {picture}: {counted(len(subject.found.timed), 'config')} measured")
    return 0
