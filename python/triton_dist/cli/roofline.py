"""Draw a roofline plot: the time of each op, and its limits by arithmetic, memory and links."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from triton_dist.timelines.summary import OpSummary

_COLOURS = {"arithmetic": "#c0392b", "memory": "#1f5f99", "link": "#3c7a3c"}
_BAR, _LIMIT = "#c9d3de", "#404040"
_WIDTH, _ROW_HEIGHT, _MAX_OPS = 9.0, 0.62, 16


def png(found: Sequence[OpSummary], peak: Mapping[str, Any], gpu: str) -> bytes:
    """Return a PNG image with a bar for the time of each op and shape. For each resource, a line
    marks the time that the op needs if the resource runs at its peak rate. The rightmost line is
    the lower bound of the op's time."""
    drawn = [each for each in found if each.ms and each.bounds_ms][:_MAX_OPS]
    with matplotlib.rc_context(
        {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(_WIDTH, 1.9 + _ROW_HEIGHT * max(len(drawn), 1)), dpi=110)
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        _roofs(axes, drawn)
        rates = f"{peak['tflops']:g} TFLOP/s (16 bit), {peak['memory_gbps']:g} GB/s of memory, "
        title = f"{gpu}\npeaks: {rates}{peak['link_gbps']:g} GB/s of links"
        axes.set_title(title, fontsize=9.5, loc="left")
        written = io.BytesIO()
        figure.savefig(written, format="png")
    return written.getvalue()


def _roofs(axes: Any, drawn: Sequence[OpSummary]) -> None:
    if not drawn:
        axes.text(0.5, 0.5, "no op with a known cost was recorded", ha="center")
        axes.set_axis_off()
        return
    positions = range(len(drawn))
    axes.barh(positions, [each.ms for each in drawn], height=0.55, color=_BAR, label="measured")
    for bound, colour in _COLOURS.items():
        limits = [(row, (each.bounds_ms or {}).get(bound, 0.0)) for row, each in enumerate(drawn)]
        lines = [(row, ms) for row, ms in limits if ms > 0]
        lows, highs = ([row + offset for row, _ in lines] for offset in (-0.36, 0.36))
        axes.vlines([ms for _, ms in lines], lows, highs, colour, linewidth=2.4, label=bound)
    for row, each in enumerate(drawn):
        note = f" {each.share:.0%} of {each.bound}" if each.share is not None else ""
        axes.text(each.ms, row, note, va="center", fontsize=8.5, color=_LIMIT)
    axes.set_yticks(positions, [_label(each) for each in drawn])
    axes.invert_yaxis()
    axes.set_xscale("log")
    low = min(min(filter(None, (each.bounds_ms or {}).values())) for each in drawn)
    high = max(each.ms or 0.0 for each in drawn)
    axes.set_xlim(low / 1.6, high * (high / low) ** 0.25 * 1.6)
    axes.set_xlabel("milliseconds of a call; a line is the time limit of one resource")
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False)


def _label(op: OpSummary) -> str:
    rate = "" if not op.tflops else f"\n{op.tflops:.4g} TFLOP/s"
    return f"{op.op} {op.shape}{rate}"
