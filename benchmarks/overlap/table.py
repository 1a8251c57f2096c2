"""Tables for people, from the tree of a report."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_dist.test.utils import NO_TIMES

from .workload import TUNED

_WIDTH = 200
"""Width of the console: the output of a launcher is not a terminal, and 80 columns wrap each
row."""
_LEGEND = """\
limit: the larger of the GEMM alone and the fastest transfer alone. own: this package's fastest.
x serial, x peer: how many times as fast as one part after the other, as the best of the peers.
A/A: the winner against itself, measured twice; smaller differences mean nothing."""
Tree = dict[str, Any]


def console() -> Console:
    return Console(width=_WIDTH, highlight=False, soft_wrap=False)


def shape_table(tree: Tree) -> Table:
    """Return a table of every row of one shape."""
    named = title(tree)
    if "seconds" in tree:
        named += f": config {tree['tuning']}; measured in {tree['seconds']:.1f} s"
    table = Table(title=named, title_justify="left")
    for name in ("", "mode", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "p10", "p90", "/ limit", "x serial"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("config", overflow="fold")
    for row in tree["rows"]:
        table.add_row(row["name"], *_row_cells(tree, row))
    table.add_section()
    for mode, summary in tree["modes"].items():
        for row in tree["rows"]:
            if (row["name"], row["mode"]) == (summary.get("best_own"), mode):
                table.add_row(f"best own: {row['name']}", *_row_cells(tree, row), style="bold")
    for name, reason in tree["failures"].items():
        table.add_row(name, "", "failed", "", "", "", "", "", reason)
    return table


def _row_cells(tree: Tree, row: Tree) -> list[str]:
    mode, time = row["mode"], row["median"]
    times = [_shown(row.get(name), 1.0, digits=4) for name in ("median", "p10", "p90")]
    over = _shown(time, tree["modes"][mode].get("limit"))
    whole = row["kind"] in ("baseline", "own", "library")
    faster = _shown(median(tree, tree["serial"], mode), time) if whole else ""
    return [mode, row["kind"], *times, over, faster, _short(row.get("config", ""))]


def _short(config: str) -> str:
    """Return a config without common values, quotes and brackets; the file has all."""
    return re.sub(r"triton\.Config\(|num_ctas=1, |'gemm_config': |\w+Method\.|[{}()']", "", config)


def summary_table(report: Tree) -> Table:
    """Return a table with one line per shape and mode: speed-ups, and time over the limit."""
    hardware = report["hardware"]
    table = Table(
        title=f"{report['op']}, {report['dtype']}, {hardware['ranks']} ranks, {hardware['gpu']}; "
        f"slowest rank, medians of {report['rounds']} interleaved rounds",
        caption=_LEGEND if "interpreter" not in hardware["gpu"] else f"{NO_TIMES}\n{_LEGEND}",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("M x N x K", "mode", "winner"):
        table.add_column(name, no_wrap=True)
    for name in (
        "tuned ms", "best own ms", "limit ms", "own / limit", "own x serial", "best peer",
        "own x peer", "tuned x peer", "A/A",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    for tree in report["shapes"]:
        for mode in tree["modes"]:
            table.add_row(title(tree), mode, *_cells(tree, mode))
    return table


def _cells(tree: Tree, mode: str) -> list[str]:
    summary = tree["modes"][mode]
    tuned, own, baseline, serial = (
        median(tree, name, mode) if name is not None else None
        for name in (TUNED, summary.get("best_own"), summary.get("best_peer"), tree["serial"])
    )
    limit, band = summary.get("limit"), summary.get("band")
    return [
        summary.get("winner", "failed"),
        *(_shown(value, 1.0) for value in (tuned, own, limit)),
        _shown(own, limit),
        _shown(serial, own),
        summary.get("best_peer", ""),
        _shown(baseline, own),
        _shown(baseline, tuned),
        "" if band is None else f"{band:.1%}",
    ]


def _shown(value: float | None, unit: float | None, digits: int = 3) -> str:
    return "" if value is None or unit is None else f"{value / unit:.{digits}f}"


def title(tree: Tree) -> str:
    """Return the shape as text. Older files do not contain it; their shapes are M, N and K."""
    return str(tree.get("shape") or f"{tree['M']}x{tree['N']}x{tree['K']}")


def median(tree: Tree, name: str, mode: str) -> float | None:
    """Return the time of a row in ms, or ``None`` if it failed."""
    medians = {(row["name"], row["mode"]): row["median"] for row in tree["rows"]}
    return medians.get((name, mode))
