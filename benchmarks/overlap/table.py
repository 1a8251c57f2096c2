"""Format results (the tree of ``results.py``) as tables."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.table import Table

from triton_dist.test.utils import TIMES_NOT_MEANINGFUL

from .workload import BEST_BASELINE, TUNED

_WIDTH = 200
"""Columns of the console. rich uses 80 if the output is no terminal, which would wrap each row."""
_LEGEND = """\
A / B: time of A divided by time of B. own: this package's fastest config.
limit: max(fastest GEMM alone, fastest transfer alone). serial: GEMM and transfer in sequence.
A/A: relative difference of two measurements of the winner. Smaller differences are noise."""
BASELINE_KINDS = ("baseline", "peer")
"""Kind of a baseline in result files; older files have "peer"."""
Tree = dict[str, Any]


def console() -> Console:
    return Console(width=_WIDTH, highlight=False, soft_wrap=False)


def shape_table(tree: Tree) -> Table:
    """Return a table of all candidates and modes of one shape."""
    heading = title(tree)
    if "seconds" in tree:
        heading += f": config {tree['tuning']}; measured in {tree['seconds']:.1f} s"
    table = Table(title=heading, title_justify="left")
    for name in ("", "mode", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("ms", "p10", "p90", "time / limit", "serial / time"):
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
    over_limit = _shown(time, tree["modes"][mode].get("limit"))
    kind = "baseline" if row["kind"] in BASELINE_KINDS else row["kind"]
    is_whole_op = kind in ("baseline", "own", "library")
    speed_up = _shown(median(tree, tree["serial"], mode), time) if is_whole_op else ""
    return [mode, kind, *times, over_limit, speed_up, _short(row.get("config", ""))]


def _short(config: str) -> str:
    """Return a config without common values, quotes and brackets."""
    return re.sub(r"triton\.Config\(|num_ctas=1, |'gemm_config': |\w+Method\.|[{}()']", "", config)


def summary_table(report: Tree) -> Table:
    """Return a table with one line per shape and mode."""
    hardware = report["hardware"]
    table = Table(
        title=f"{report['op']}, {report['dtype']}, {hardware['ranks']} ranks, {hardware['gpu']}; "
        f"slowest rank, medians of {report['rounds']} interleaved rounds",
        caption=_LEGEND
        if "interpreter" not in hardware["gpu"]
        else f"{TIMES_NOT_MEANINGFUL}\n{_LEGEND}",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("M x N x K", "mode", "winner"):
        table.add_column(name, no_wrap=True)
    for name in (
        "tuned ms", "best own ms", "limit ms", "own / limit", "serial / own", "best baseline",
        "baseline / own", "baseline / tuned", "A/A",
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
        for name in (TUNED, summary.get("best_own"), summary.get(BEST_BASELINE), tree["serial"])
    )
    limit, noise = summary.get("limit"), summary.get("band")
    return [
        summary.get("winner", "failed"),
        *(_shown(value, 1.0) for value in (tuned, own, limit)),
        _shown(own, limit),
        _shown(serial, own),
        summary.get(BEST_BASELINE, ""),
        _shown(baseline, own),
        _shown(baseline, tuned),
        "" if noise is None else f"{noise:.1%}",
    ]


def _shown(value: float | None, unit: float | None, digits: int = 3) -> str:
    return "" if value is None or unit is None else f"{value / unit:.{digits}f}"


def title(tree: Tree) -> str:
    """Return the shape as text. Older files have only its M, N and K."""
    return str(tree.get("shape") or f"{tree['M']}x{tree['N']}x{tree['K']}")


def median(tree: Tree, name: str, mode: str) -> float | None:
    """Return the median time of a candidate in ms; ``None`` if it failed in this mode."""
    medians = {(row["name"], row["mode"]): row["median"] for row in tree["rows"]}
    return medians.get((name, mode))
