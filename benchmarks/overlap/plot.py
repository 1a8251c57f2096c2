"""A picture of a report: how much is gained over doing one part after the other, and how far the
limit is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .table import median, title
from .workload import TUNED

Tree = dict[str, Any]
_COLOURS = ("#1f5f99", "#7fb2d9", "#d98c3f", "#8c8c8c", "#5a9e6f", "#b65f7c")
_WIDTH = 0.8
"""Of the bars of one shape, where shapes are 1 apart."""


def check_matplotlib() -> None:
    """Raises ``SystemExit`` with what to do, before anything was measured in vain."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit(
            "--png needs matplotlib, which is not installed here: pip install matplotlib, or write "
            "--json now and draw it elsewhere: bench_overlap.py --from-json FILE --png FILE"
        ) from None


def draw(report: Tree, path: Path) -> None:
    """Write a PNG with a row of two panels a mode."""
    check_matplotlib()
    from matplotlib.figure import Figure

    shapes = report["shapes"]
    modes = list(dict.fromkeys(mode for tree in shapes for mode in tree["modes"]))
    figure = Figure(figsize=(5 + 1.6 * len(shapes), 4 * len(modes) + 0.8), layout="constrained")
    hardware = report["hardware"]
    figure.suptitle(
        f"{report['op']}, {report['dtype'].removeprefix('torch.')}, {hardware['ranks']} ranks, "
        f"{hardware['gpu']}; torch {report['software']['torch']}, "
        f"triton {report['software']['triton']}"
    )
    panels = figure.subplots(len(modes), 2, squeeze=False)
    for (left, right), mode in zip(panels, modes, strict=True):
        _bars(left, shapes, mode, over_limit=False)
        left.set_title(f"{mode}: speed-up over {shapes[0]['serial']}; higher is better")
        _bars(right, shapes, mode, over_limit=True)
        right.set_title(f"{mode}: time / limit; lower is better")
        right.set_ylim(bottom=0.9)
        right.legend(fontsize="small")
    figure.savefig(path, dpi=130)


def _bars(panel: Any, shapes: list[Tree], mode: str, over_limit: bool) -> None:
    """Best own config, winner and peers of each shape, as groups of bars with a line at 1."""
    peers = dict.fromkeys(
        row["name"] for tree in shapes for row in tree["rows"] if row["kind"] == "peer"
    )
    series = ["best own", TUNED, *(name for name in peers if name != shapes[0]["serial"])]
    if over_limit:
        series.append(shapes[0]["serial"])
    width = _WIDTH / len(series)
    for place, name in enumerate(series):
        heights = [_ratio(tree, mode, name, over_limit) for tree in shapes]
        # Colours go with names: the same in both panels.
        colour = _COLOURS[place % len(_COLOURS)]
        offset = (place - (len(series) - 1) / 2) * width
        bars = panel.bar(
            [index + offset for index in range(len(shapes))],
            heights,
            width,
            label=name,
            color=colour,
        )
        panel.bar_label(bars, fmt=_label, fontsize=6, rotation=90, padding=2)
    panel.axhline(1.0, color="black", linewidth=0.8)
    panel.set_xticks(range(len(shapes)), [title(tree) for tree in shapes], rotation=30, ha="right")
    panel.margins(y=0.15)


def _label(height: float) -> str:
    return f"{height:.2f}" if height == height else ""


def _ratio(tree: Tree, mode: str, name: str, over_limit: bool) -> float:
    """NaN, which is drawn as nothing, where something failed."""
    summary = tree["modes"].get(mode, {})
    own = median(tree, summary.get("best_own", ""), mode) if name == "best own" else None
    time = own if name == "best own" else median(tree, name, mode)
    unit = summary.get("limit") if over_limit else median(tree, tree["serial"], mode)
    if time is None or unit is None:
        return float("nan")
    ratio: float = time / unit if over_limit else unit / time
    return ratio
