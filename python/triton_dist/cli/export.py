"""``export``: write records as CSV, JSON or T4, the autotuning community's format."""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from triton_dist import _files
from triton_dist._tuning.values import Failure, StoredRecord, Trial, TuningRecord
from triton_dist._tuning.values.analysis import parameters
from triton_dist._warn import printable
from triton_dist.cli import cache, show
from triton_dist.cli.subcommand import add_subcommand, counted

_T4_INVALIDITY = {
    "pruned": "constraints",
    "resources": "constraints",
    "compile": "compile",
    "launch": "runtime",
    "crashed": "runtime",
    "timeout": "timeout",
    "wrong_result": "correctness",
}
"""Values of ``invalidity`` in the T4 format, by the kind of a failure."""


def add_to(subcommands: Any) -> None:
    parser = add_subcommand(
        subcommands,
        "export",
        _run,
        help="write records as CSV, JSON or T4",
        description="Writes the records of FUNCTION, or the record in FILE, to standard output or "
        "to --out. Formats: csv has a line for each config and a column for each parameter. json "
        "equals the output of `show --json`. t4 is the format of the autotuning community's "
        "benchmark hub, which other tuners can replay; it contains a single record.",
        examples=[
            "export matmul > matmul.csv",
            "export matmul --key 8192 --format t4 --out matmul_T4.json",
        ],
    )
    cache.add_record_options(parser, "FUNCTION|FILE", "function name, or a record's file")
    parser.add_argument(
        "--format", choices=sorted(_FORMATS), default="csv", help="output format; default: csv"
    )
    parser.add_argument(
        "--json", action="store_const", const="json", dest="format", help="same as --format json"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="file to write; default: standard output"
    )


def _run(arguments: argparse.Namespace) -> int:
    found = cache.select_records(arguments.function, arguments)
    if not found:
        return cache.print_no_record(arguments.function, arguments)
    if arguments.format == "t4":
        found = [cache.single_record(arguments.function, found)]
    written = _FORMATS[arguments.format](found)
    if arguments.out is None:
        sys.stdout.write(written)
        return 0
    _files.write(arguments.out, written.encode())
    configs = sum(len(stored.record.trials) for stored in found)
    records = counted(len(found), "record")
    print(f"{arguments.out}: {records}, {counted(configs, 'config')}")
    return 0


def _csv(found: Sequence[StoredRecord]) -> str:
    rows = [_row(stored.record, trial) for stored in found for trial in stored.record.trials]
    names = dict.fromkeys(name for row in rows for name in row if name not in _LAST_COLUMNS)
    text = io.StringIO()
    table = csv.DictWriter(text, [*names, *_LAST_COLUMNS], lineterminator="\n")
    table.writeheader()
    for row in rows:
        texts = {n: printable(value) for n, value in row.items() if isinstance(value, str)}
        table.writerow(row | texts)
    return text.getvalue()


_LAST_COLUMNS = ("ms", "samples", "failure", "message")


def _row(record: TuningRecord, trial: Trial) -> dict[str, Any]:
    key, outcome = record.key, trial.outcome
    row = {"function": key.full_name, "key": str(key), "hardware": cache.hardware_text(record)}
    row |= {
        f"{n}'" if n in (*row, *_LAST_COLUMNS) else n: v
        for n, v in parameters(trial.config).items()
    }
    if isinstance(outcome, Failure):
        failed = {"failure": outcome.kind, "message": outcome.message}
        return {**row, "ms": "", "samples": 0, **failed}
    found = {"ms": outcome.median, "samples": len(outcome.samples)}
    return {**row, **found, "failure": "", "message": ""}


def t4(found: Sequence[StoredRecord]) -> str:
    """Return the first record in the T4 format."""
    results = [_result(trial) for trial in found[0].record.trials]
    metadata = {"timeunit": "milliseconds", "function": found[0].record.key.full_name}
    return json.dumps({"schema_version": "1.0.0", "metadata": metadata, "results": results}) + "\n"


def _result(trial: Trial) -> dict[str, Any]:
    outcome, configuration = trial.outcome, _typed(parameters(trial.config))
    if isinstance(outcome, Failure):
        invalidity, runtimes, measurements = _T4_INVALIDITY[outcome.kind], [], []
    else:
        invalidity, runtimes = "correct", list(outcome.samples)
        measurements = [{"name": "time", "value": outcome.median, "unit": "ms"}]
    return {
        "configuration": configuration,
        "invalidity": invalidity,
        "correctness": int(invalidity == "correct"),
        "times": {"runtimes": runtimes},
        "measurements": measurements,
        "objectives": ["time"],
    }


def _typed(values: Mapping[str, str]) -> dict[str, Any]:
    """Convert texts of numbers and booleans to values, because other tuners sort by value."""
    typed: dict[str, Any] = dict(values)
    for name, text in values.items():
        with suppress(ValueError):
            typed[name] = json.loads({"True": "true", "False": "false"}.get(text, text))
    return typed


_FORMATS = {
    "csv": _csv,
    "json": lambda found: json.dumps({"records": [*map(show.tree, found)]}, indent=2) + "\n",
    "t4": t4,
}
