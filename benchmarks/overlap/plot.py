"""Plot speed-up over the serial baseline (GEMM and transfer in sequence), and time / limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .table import BASELINE_KINDS, median, title
from .workload import TUNED

Tree = dict[str, Any]
# A series has the same colour in all plots. _BASELINE_COLOURS is keyed by parts of names.
_TUNED_COLOUR, _SERIAL_COLOUR, _OTHER_COLOUR = "#1f5f99", "#8c8c8c", "#c9b458"
_BASELINE_COLOURS = {"async-TP": "#d98c3f", "one-shot": "#b65f7c", "two-shot": "#5a9e6f"}
_OPS = {"ag_gemm": "AllGather-GEMM", "gemm_rs": "GEMM-ReduceScatter", "gemm_ar": "GEMM-AllReduce"}
_MODE_TITLES = {"eager": "called from Python", "graph": "replayed in a CUDA graph"}
_WIDTH = 11.0
"""Width in inches. The height is at least half of it, so numbers are legible on a page."""


def check_matplotlib() -> None:
    """Raise ``SystemExit`` with instructions if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SystemExit(
            "--png needs matplotlib, which is not installed: pip install matplotlib. Or write "
            "--json FILE now and plot it elsewhere: bench_overlap.py --from-json FILE --png FILE"
        ) from None


def draw(report: Tree, path: Path) -> None:
    """Write a PNG with two panels per mode: speed-up, and time divided by the limit."""
    check_matplotlib()
    from matplotlib.figure import Figure

    shapes, names = report["shapes"], series(report["shapes"])
    modes = list(dict.fromkeys(mode for tree in shapes for mode in tree["modes"]))
    bars = len(modes) * len(shapes) * (len(names) + 1)
    figure = Figure(figsize=(_WIDTH, max(_WIDTH / 2, 2.4 + 0.14 * bars)), layout="constrained")
    hardware, software = report["hardware"], report["software"]
    figure.suptitle(
        f"{_OPS.get(report['op'], report['op'])} on {hardware['ranks']} x {hardware['gpu']}, "
        f"{report['dtype'].removeprefix('torch.')}, torch {software['torch']}, "
        f"triton {software['triton']}\n\n"  # the first panel has the legend
    )
    panels = figure.subplots(len(modes), 2, squeeze=False, sharey="row")
    for (left, right), mode in zip(panels, modes, strict=True):
        _bars(left, shapes, mode, names, over_limit=False)
        _bars(right, shapes, mode, names, over_limit=True)
        left.set_title("speed-up over the serial baseline; longer is better", fontsize=10)
        right.set_title("time / limit; shorter is better", fontsize=10)
        left.set_ylabel(f"M x N x K, {_MODE_TITLES.get(mode, mode)}")
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="upper center", bbox_to_anchor=(0.5, 1 - 0.27 / figure.get_figheight()),
        ncols=len(names), frameon=False,
    )  # fmt: skip
    figure.supxlabel("\n".join(notes(report)), fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


def series(shapes: list[Tree]) -> list[str]:
    """Return the names of the bars: the tuned op, the baselines, and last the serial baseline."""
    serial = shapes[0]["serial"]
    rows = [row for tree in shapes for row in tree["rows"] if row["kind"] in BASELINE_KINDS]
    return [TUNED, *dict.fromkeys(row["name"] for row in rows if row["name"] != serial), serial]


def notes(report: Tree) -> list[str]:
    """Return the lines of explanation below the bars."""
    shapes = report["shapes"]
    lines = [
        f"Serial baseline: {shapes[0]['serial']}. Limit: max(fastest GEMM alone, fastest transfer "
        "alone).",
        f"Medians of {report['rounds']} samples; a sample is the time of the slowest rank. "
        + (
            "Lines at the ends of bars: 10th to 90th percentile."
            if all("p10" in row for tree in shapes for row in tree["rows"])
            else "The file has no percentiles; column A/A of the table shows the noise."
        ),
    ]
    bars = [
        bar_length(tree, mode, name, over_limit=True)
        for tree in shapes
        for mode in tree["modes"]
        for name in series(shapes)
    ]
    if None in bars:
        lines.append("none: the candidate failed or does not support the shape.")
    if any(bar is not None and bar < 1 for bar in bars):
        lines.append(
            "Right, below 1: faster than the GEMM or transfer alone whose measured time is the "
            "limit, or equal within noise."
        )
    return lines


def bar_length(tree: Tree, mode: str, name: str, over_limit: bool) -> float | None:
    """Return time / limit or the speed-up over the serial baseline; ``None`` after a failure."""
    time, unit = median(tree, name, mode), _reference_ms(tree, mode, over_limit)
    if time is None or unit is None:
        return None
    return time / unit if over_limit else unit / time


def _reference_ms(tree: Tree, mode: str, over_limit: bool) -> float | None:
    limit: float | None = tree["modes"].get(mode, {}).get("limit")
    return limit if over_limit else median(tree, tree["serial"], mode)


def _bars(panel: Any, shapes: list[Tree], mode: str, names: list[str], over_limit: bool) -> None:
    """Draw groups of horizontal bars from 0, the first shape on top, with a line at 1."""
    thickness = 1 / (len(names) + 1)
    for number, name in enumerate(names):
        lengths = [bar_length(tree, mode, name, over_limit) for tree in shapes]
        heights = [index + (number + 1) * thickness - 0.5 for index in range(len(shapes))]
        panel.barh(
            heights, [length or 0.0 for length in lengths], thickness, label=name,
            color=_colour(name, shapes[0]["serial"]), error_kw={"elinewidth": 1.0},
            xerr=_error_bars(shapes, mode, name, over_limit),
        )  # fmt: skip
        for length, height in zip(lengths, heights, strict=True):
            if length is None:
                panel.text(0.0, height, " none", va="center", fontsize=8)
            elif name == TUNED:
                panel.text(length, height, f"  {length:.2f}", va="center", fontsize=9)
    panel.axvline(1.0, color="black", linewidth=0.8)
    panel.set_yticks(range(len(shapes)), [title(tree) for tree in shapes])
    panel.set_ylim(len(shapes) - 0.5, -0.5)
    panel.margins(x=0.12)


def _colour(name: str, serial: str) -> str:
    fixed = {TUNED: _TUNED_COLOUR, serial: _SERIAL_COLOUR}
    matching = [colour for part, colour in _BASELINE_COLOURS.items() if part in name]
    return fixed.get(name) or [*matching, _OTHER_COLOUR][0]


def _error_bars(shapes: list[Tree], mode: str, name: str, over_limit: bool) -> list[list[float]]:
    """Return how far error bars (10th to 90th percentile) extend left and right of bar ends."""
    left, right = [], []
    for tree in shapes:
        length = bar_length(tree, mode, name, over_limit)
        unit = _reference_ms(tree, mode, over_limit)
        rows = {(row["name"], row["mode"]): row for row in tree["rows"]}
        row = rows.get((name, mode), {})
        ends = [0.0, 0.0]
        if length is not None and unit is not None and "p10" in row:
            ratios = [row[p] / unit if over_limit else unit / row[p] for p in ("p10", "p90")]
            ends = [max(0.0, length - min(ratios)), max(0.0, max(ratios) - length)]
        left.append(ends[0])
        right.append(ends[1])
    return [left, right]
