"""``list``: a table of all records."""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from triton_dist._tuning.values import StoredRecord
from triton_dist.cli import cache

_SECONDS = {"d": 86400, "h": 3600, "min": 60, "s": 1}


def add_to(verbs: Any) -> None:
    parser: argparse.ArgumentParser = verbs.add_parser(
        "list",
        help="all records, or those of a function",
        description="A table of the records in the cache, and in the read-only folders.",
    )
    parser.add_argument("function", metavar="FUNCTION", nargs="?", help="only records of it")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    store = cache.all_stores()
    asked = arguments.function
    records = list(store.records() if asked is None else cache.records_of(store, asked))
    if not records:
        print(f"No record of {asked or 'any function'} in {cache.folders()}.")
        return 1 if asked else 0
    table = Table("function", "key", "hardware", "winner", "median", "age", "file")
    for stored in records:
        table.add_row(*_row(stored))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 1000  # a line a record, for grep
    console.print(table)
    return 0


def _row(stored: StoredRecord) -> tuple[str, ...]:
    record, where = stored
    best = record.best
    return (
        record.key.full_name,
        str(record.key),
        record.key.hardware,
        str(best),
        f"{best.outcome.median:.4f} ms",  # type: ignore[union-attr]  # the best was measured
        _age(record.timestamp),
        where,
    )


def _age(timestamp: str) -> str:
    try:
        then = datetime.datetime.fromisoformat(timestamp)
        seconds = (datetime.datetime.now(datetime.timezone.utc) - then).total_seconds()
    except (ValueError, TypeError):
        return "unknown"
    for unit, size in _SECONDS.items():
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return "now"
