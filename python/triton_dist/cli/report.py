"""``report``: write HTML pages with plots and tables of tunings."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from triton_dist import _files
from triton_dist.cli import cache, text
from triton_dist.cli.subcommand import add_subcommand, counted
from triton_dist.errors import MissingExtra


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "report",
        _run,
        help="write HTML pages with plots and tables of tunings",
        description="Writes a page for each record, and index.html, which lists all records with "
        "function, key, GPU and number of tunings. A page has the times of the winner and of the "
        "default config, plots, and a table of all configs that can be sorted and filtered. No "
        "network is needed. With --out FILE.html, writes a single record to a single file. "
        "Requires plotly (the extra `report`).",
        examples=[
            "report --out reports",
            "report matmul --key 8192 --out matmul.html",
            "report matmul --key 8192 --against old.json --out matmul.html",
        ],
    )
    cache.add_function_argument(
        parser, metavar="FUNCTION|FILE", nargs="?",
        help="function name, or a record's file; default: all records except shipped records",
    )  # fmt: skip
    cache.add_record_options(parser)
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="an older record's file, to compare with"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR|FILE.html",
        help="output folder, or the file for a single record",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the main results as JSON")


def _run(arguments: argparse.Namespace) -> int:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra("triton-dist report", "plotly", "report") from error
    from triton_dist.cli import page
    from triton_dist.cli.report_data import ReportedRecord

    function, out = arguments.function, arguments.out
    if function is None:
        found = cache.matching_records(
            cache.records_of(cache.folders_of_records(), None), arguments
        )
    else:
        found = cache.select_records(function, arguments)
    if not found:
        return cache.print_no_record(function or "any function", arguments)
    older = None if arguments.against is None else cache.record_in_file(arguments.against)
    is_file = out.suffix == ".html"
    if is_file or older is not None:
        found = [cache.single_record(function or "any function", found)]
    reported_records = sorted((ReportedRecord(each, older) for each in found), key=_sort_key)
    files = [out] if is_file else [out / each.page_name for each in reported_records]
    pages = {
        file: page.record_page(reported, get_plotlyjs() if is_file else None)
        for file, reported in zip(files, reported_records, strict=True)
    }
    if not is_file:
        pages |= {
            out / page.PLOTLY: get_plotlyjs(),
            out / "index.html": page.index_page(reported_records),
        }
    for file, content in pages.items():
        _files.write(file, content.encode("utf-8", "backslashreplace"))
    if arguments.json:
        trees = [
            _tree(reported, file) for reported, file in zip(reported_records, files, strict=True)
        ]
        text.print_json({"pages": trees})
    else:
        print(
            f"{out if is_file else out / 'index.html'}: {counted(len(reported_records), 'tuning')}"
        )
    return 0


def _sort_key(reported: Any) -> str:
    key = reported.stored.record.key
    return text.natural_order(f"{key.full_name} {key}")


def _tree(reported: Any, file: Path) -> dict[str, Any]:
    key, default = reported.stored.record.key, reported.default
    return {
        "html": str(file), "function": key.full_name, "key": str(key), "hardware": key.hardware,
        "ms": reported.analysis.winner.ms, "default_ms": default and default.ms,
        "speed_up": reported.speed_up, "phases": reported.phases,
        "history": [each._asdict() for each in reported.history],
    }  # fmt: skip
