"""Write the HTML pages of a report: a page for a record, and an index of pages.

A page contains its data as JSON, from which ``report.js`` builds tables and plots. The script never
interprets texts of records as HTML. The page's title contains them escaped. Pages need no network.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from triton_dist._tuning.values import Failure
from triton_dist._tuning.values.analysis import ABSENT, parameters, show_parameters
from triton_dist._tuning.values.show import spread
from triton_dist.cli import cache, compare, plots
from triton_dist.cli.report_data import ReportedRecord

PLOTLY = "plotly.min.js"


def record_page(reported: ReportedRecord, plotly: str | None) -> str:
    """Return the page of one record. ``plotly`` is described at :func:`_page`."""
    key = reported.stored.record.key
    tables = [_configs(reported), _parameters(reported), _history(reported), _by_rank(reported)]
    return _page(
        f"{key.full_name}, key {key}",
        plotly,
        cards=_cards(reported),
        facts=[(name, text) for name, text in _facts(reported).items() if text],
        figures=[each._asdict() for each in plots.figures(reported)],
        tables=[table for table in (*tables, _failures(reported)) if table["rows"]],
        changes=[] if reported.changes is None else [*compare.lines_of_changes(reported.changes)],
    )


def index_page(reported_records: Sequence[ReportedRecord]) -> str:
    """Return the index page, with a row and a link for each of ``reported_records``."""
    columns = [
        _column("function", filter=True, sticky=True), _column("key"), _column("default ms", 4),
        _column("speed-up", 2), _column("winner ms", 4), _column("GPU", filter=True),
        _column("ranks", filter=True), _column("configs"), _column("tuned"), _column("tunings"),
        _column("to previous", 3), _column("new winner", filter=True), _column("winner"),
        _column("hardware"), _column("module"),
    ]  # fmt: skip
    rows = []
    for each in reported_records:
        record, past, facts = each.stored.record, each.history, each.stored.record.fingerprint
        before, now = past[-2:] if len(past) > 1 else (past[0], past[0])
        rows.append([
            record.key.function, str(record.key), each.default and each.default.ms, each.speed_up,
            each.analysis.winner.ms, facts.hardware.get("gpu", "-"),
            _cell(facts.topology.get("world_size", "1")), len(each.analysis.timed),
            record.timestamp, len(past),
            now.ms / before.ms if len(past) > 1 and before.ms else None,
            "yes" if now.winner != before.winner else "no", str(record.best),
            cache.hardware_text(record), record.key.module,
        ])  # fmt: skip
    several = [each for each in reported_records if len(each.history) > 1]
    note = "to previous: the winner's time divided by the winner's time in the previous tuning"
    table = _table(
        "Records", columns, rows, note, links=[each.page_name for each in reported_records]
    )
    figures = [plots.history(several)._asdict()] if several else []
    return _page("Tunings", None, figures=figures, tables=[table])


def _page(title: str, plotly: str | None, **parts: Any) -> str:
    """Return the page that ``report.js`` fills with ``parts``.

    Args:
        plotly: source of plotly.js, to be embedded in the page; ``None``: the page loads the file
            ``PLOTLY`` from its own folder.
    """
    style, script = (Path(__file__).with_name(f"report.{end}").read_text() for end in ("css", "js"))
    # Without "<", a text in the data cannot end the element <script>.
    data = json.dumps({"title": title, **parts}, separators=(",", ":")).replace("<", "\\u003c")
    code = f' src="{PLOTLY}">' if plotly is None else f">{plotly}"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{style}</style>
<body>{'<p><a href="index.html">All tunings</a></p>' * (plotly is None and "cards" in parts)}
<noscript>This page needs JavaScript.</noscript>
<script{code}</script>
<script id="data" type="application/json">{data}</script>
<script>{script}</script></html>
"""


def _cards(reported: ReportedRecord) -> list[tuple[str, str, str]]:
    analysis, default = reported.analysis, reported.default
    digits = _digits(analysis.winner.ms)
    winner = ("winner", f"{analysis.winner.ms:.{digits}f} ms", str(analysis.winner.trial))
    if default is None:
        note = "the first config of the space failed, was not tried, or is not recorded"
        return [("default config", "not measured", note), winner]
    return [
        ("default config", f"{default.ms:.{digits}f} ms", str(default.trial)),
        ("speed-up", f"{reported.speed_up:.2f}x", "default config's time / winner's time"),
        winner,
    ]


def _facts(reported: ReportedRecord) -> dict[str, str]:
    (record, location), analysis = reported.stored, reported.analysis
    facts, samples = record.fingerprint, [len(each.samples) for each in analysis.timed]
    software = {name: text for name, text in facts.software.items() if name != "settings"}
    return {
        "GPU": facts.hardware.get("gpu", ""),
        "driver": facts.hardware.get("driver", ""),
        "versions": ", ".join(f"{name} {text}" for name, text in software.items()),
        "hardware": cache.hardware_text(record),
        "tuned": record.timestamp,
        "took": f"{record.seconds:.1f} s" if record.seconds else "",
        "samples": f"{sum(samples)} for {len(samples)} configs, {min(samples)} to {max(samples)} "
        f"each; {len(record.trials) - len(samples)} configs failed or were pruned",
        "policy": ", ".join(f"{name} {value}" for name, value in facts.policy.items()),
        "warm start": record.warm_started_from,
        "all configs": show_parameters(analysis.fixed, analysis.fixed),
        "file": location,
    }


def _configs(reported: ReportedRecord) -> dict[str, Any]:
    """Return the table of all configs: measured configs, fastest first, then all others."""
    analysis, default, names = reported.analysis, reported.default, reported.analysis.varying
    columns = [
        _column("#", sticky=True), _column("ms", _digits(analysis.winner.ms), sticky=True),
        _column("to winner", 3), _column("speed-up", 3), _column("spread %", 1), _column("samples"),
        _column("status", filter=True), *(_column(name, filter=True) for name in names),
    ]  # fmt: skip
    rows: list[list[Any]] = []
    for position, each in enumerate(analysis.timed, 1):
        status = [
            n for n, one in (("default", default), ("winner", analysis.winner)) if one is each
        ]
        rows.append([
            position, round(each.ms, 6), round(analysis.ratio(each.ms), 5),
            default and round(default.ms / max(each.ms, 1e-9), 5),
            None if (text := spread(each.samples)) == "-" else float(text[:-1]), len(each.samples),
            ", ".join(status) or "measured",
            *(_cell(each.parameters.get(name, ABSENT)) for name in names),
        ])  # fmt: skip
    for trial in reported.stored.record.trials:
        if isinstance(trial.outcome, Failure):
            values = parameters(trial.config)
            cells = [_cell(values.get(name, ABSENT)) for name in names]
            rows.append([None, None, None, None, None, 0, trial.outcome.kind, *cells])
    return _table("Configs", columns, rows, marked=analysis.timed.index(analysis.winner))


def _parameters(reported: ReportedRecord) -> dict[str, Any]:
    rows = [
        [name, 100 * share,
         ", ".join(
             f"{value} {slowdown:+.1%}"
             for value, slowdown in reported.analysis.slowdown_by_value(name).items()
         )]
        for name, share in reported.analysis.parameters_by_importance()
    ]  # fmt: skip
    note = "cost: the time of the fastest config with the value, relative to the winner"
    columns = [_column("parameter"), _column("importance %", 1), _column("cost of each value")]
    return _table("Parameters", columns, rows, note)


def _history(reported: ReportedRecord) -> dict[str, Any]:
    columns = [_column("ended"), _column("ms", _digits(reported.analysis.winner.ms)),
               _column("seconds", 1), _column("reason"), _column("winner")]  # fmt: skip
    return _table("Tunings of this key", columns, [[*each] for each in reported.history])


def _by_rank(reported: ReportedRecord) -> dict[str, Any]:
    """Return the table of times by rank, for the configs whose times by rank are recorded."""
    known, names = reported.analysis.record.times_by_rank, reported.analysis.varying
    rows = []
    for each in reported.analysis.timed:
        if (own := known.get(each.trial.digest)) is not None:
            total = max(sum(own.num_slowest), 1)
            cells = (f"{ms:.4f}, {slow / total:.0%}" for ms, slow in zip(*own, strict=True))
            rows.append([show_parameters(each.parameters, names), *cells])
    ranks = range(len(rows[0]) - 1 if rows else 0)
    columns = [_column("config"), *(_column(f"rank {rank}") for rank in ranks)]
    note = "median ms, and the share of samples in which the rank was the slowest"
    return _table("By rank", columns, rows, note)


def _failures(reported: ReportedRecord) -> dict[str, Any]:
    record, analysis = reported.stored.record, reported.analysis
    pruned = Counter(reason for _, reason in analysis.pruned) + Counter(record.num_pruned_by_reason)
    rows = [[each.kind, each.count, each.first[:500]] for each in analysis.failed]
    rows += [["pruned", count, reason] for reason, count in pruned.most_common()]
    rows += [["always failed", n, f"{name}={value}"] for name, value, n in analysis.always_failed()]
    columns = [_column("kind"), _column("configs"), _column("first message, reason or value")]
    return _table("Not measured", columns, rows)


def _column(name: str, digits: int | None = None, **options: bool) -> dict[str, Any]:
    """Return a column of a table.

    Args:
        digits: number of decimals of the column's numbers; ``None``: any values.
        options: ``filter``: rows can be filtered by the column's values. ``sticky``: the column
            stays at the left edge when the table is scrolled.
    """
    return {"name": name, "digits": digits, **options}


def _table(
    title: str, columns: list[Any], rows: list[Any], note: str = "", **more: Any
) -> dict[str, Any]:
    return {"title": title, "columns": columns, "rows": rows, "note": note, **more}


def _cell(value: str) -> str | int:
    """Return ``value`` as an int if it is an integer that JavaScript represents exactly."""
    return int(value) if value.lstrip("-").isdecimal() and len(value) < 16 else value


def _digits(ms: float) -> int:
    """Return the number of decimals with which ``ms`` has four significant digits."""
    return min(6, max(1, 3 - math.floor(math.log10(ms)))) if ms > 0 else 4
