"""Describe the plots of a report as JSON that plotly.js draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import accumulate
from typing import Any, NamedTuple

from triton_dist._tuning.values.analysis import MeasuredTrial, show_parameters
from triton_dist.cli.report_data import ReportedRecord

# Colours.
_FAINT, _MAIN, _WINNER, _DEFAULT = "#8fa9c4", "#3b7dd8", "#d9542b", "#8a5cc2"
_GRID_COLOR = "rgba(128,128,128,.25)"
_PHASES = ("compile", "measure", "agree", "search", "other")
_MAX_BARS, _MAX_FASTEST, _MAX_LABEL_LENGTH = 12, 8, 28
_MAX_PLOTTED_RATIO = 1.25
"""The plot of the fastest configs leaves out configs whose time is more than this multiple of the
winner's time, unless fewer than three configs would remain."""
_MIN_LOGARITHMIC_RATIO = 4
"""An axis is logarithmic if its largest value exceeds its smallest by this factor."""
_MIN_WEBGL_POINTS = 2000
"""More points than this are drawn with WebGL."""
_FEW_SAMPLES = 2
"""Configs with at most this number of samples were eliminated early and are drawn faint."""


class Figure(NamedTuple):
    """A plot, in plotly's JSON. ``customdata`` in ``data`` has the row of each point in the table
    of configs, for hover texts and filters."""

    title: str
    text: str
    """What the plot shows, and its main result."""
    data: list[dict[str, Any]]
    layout: dict[str, Any]


def figures(reported: ReportedRecord) -> Iterator[Figure]:
    """Yield the figures that have data."""
    analysis = reported.analysis
    has_several_configs = len(analysis.timed) > 1
    for draw, has_data in (
        (_sorted_times, has_several_configs),
        (_convergence, reported.measurements),
        (_fastest_configs, has_several_configs),
        (_importance, analysis.varying),
        (_cost_of_values, analysis.varying),
        (_phases, sum(reported.phases.values()) > 0),
        (_changes_since_older, reported.changes and reported.changes.common),
    ):
        if has_data:
            yield draw(reported)
    if len(reported.history) > 1:
        yield history([reported])


def _sorted_times(reported: ReportedRecord) -> Figure:
    analysis = reported.analysis
    ratios = [analysis.ratio(each.ms) for each in analysis.timed]
    data = []
    groups: list[tuple[str, str, str, int, Callable[[MeasuredTrial], bool]]] = [
        (f"{_FEW_SAMPLES} samples or fewer", _FAINT, "circle", 6, _has_few_samples),
        ("more samples", _MAIN, "circle", 6, lambda each: not _has_few_samples(each)),
        ("default", _DEFAULT, "diamond", 12, lambda each: each is reported.default),
        ("winner", _WINNER, "star", 14, lambda each: each is analysis.winner),
    ]
    for name, colour, symbol, size, is_in_group in groups:
        group_rows = [row for row, each in enumerate(analysis.timed) if is_in_group(each)]
        x, y = [row + 1 for row in group_rows], [ratios[row] for row in group_rows]
        if group_rows:
            data.append(_points(x, y, colour, name, group_rows, size, symbol))
    layout = _layout(f"config, of {len(ratios)} measured", "time / winner's time", y=ratios)
    layout["shapes"] = [_line(y0=1.01, y1=1.01, x0=0, x1=1, xref="paper")]
    near = ", ".join(f"{analysis.count_within(p / 100)} within {p} %" for p in (1, 5, 10))
    text = f"{len(ratios)} configs, fastest first; {near} of the winner (dashed line: 1 %)."
    return Figure("All configs, sorted", text, data, layout)


def _convergence(reported: ReportedRecord) -> Figure:
    measurements = reported.measurements
    row_of = {each.trial.digest: row for row, each in enumerate(reported.analysis.timed)}
    seconds, times = [each.seconds for each in measurements], [each.ms for each in measurements]
    rows = [row_of.get(each.config, -1) for each in measurements]
    lowest = list(accumulate(times, min))
    line = {"type": "scatter", "mode": "lines", "name": "lowest so far", "x": seconds, "y": lowest,
            "line": {"shape": "hv", "color": _WINNER}, "hoverinfo": "skip"}  # fmt: skip
    last = seconds[lowest.index(lowest[-1])]
    text = (
        f"{len(measurements)} measurements in {seconds[-1]:.3g} s; the lowest after {last:.3g} s."
    )
    layout = _layout("seconds since the tuning began", "ms", y=times)
    data = [_points(seconds, times, _MAIN, "measurement", rows, 5), line]
    return Figure("Convergence", text, data, layout)


def _fastest_configs(reported: ReportedRecord) -> Figure:
    analysis = reported.analysis
    near = [each for each in analysis.timed if analysis.ratio(each.ms) <= _MAX_PLOTTED_RATIO]
    best = (near if len(near) > 2 else list(analysis.timed[:3]))[:_MAX_FASTEST]
    data: list[dict[str, Any]] = []
    for number, each in enumerate(best, 1):
        colour = _WINNER if each is analysis.winner else _FAINT if _has_few_samples(each) else _MAIN
        data.append({
            "type": "box", "name": f"#{number} {_differences_from_winner(reported, each)}",
            "x": [round(analysis.ratio(sample), 5) for sample in each.samples], "boxpoints": "all",
            "jitter": 0.5, "pointpos": 0, "orientation": "h", "line": {"width": 1},
            "marker": {"size": 5, "color": colour}, "hoverinfo": "x",
        })  # fmt: skip
    last = 1.02 + 2 * (max(analysis.ratio(each.ms) for each in best) - 1)
    ratios = [ratio for each in data for ratio in each["x"]]
    beyond = sum(ratio > last for ratio in ratios)
    layout = _layout("sample / winner's median", "") | {"showlegend": False}
    first, last = max(0.0, min(ratios) - 0.005), min(last, max(*ratios, 1.01) + 0.005)
    layout["xaxis"] |= {"range": [first, last]}
    layout["yaxis"] |= {"autorange": "reversed"}
    text = f"The {len(best)} fastest configs, named by their differences from the winner"
    text += f"; samples beyond the axis: {beyond}." if beyond else "."
    return Figure("The fastest: all samples", text, data, layout)


def _has_few_samples(each: MeasuredTrial) -> bool:
    return len(each.samples) <= _FEW_SAMPLES


def _differences_from_winner(reported: ReportedRecord, each: MeasuredTrial) -> str:
    """Return the parameters in which a config differs from the winner."""
    winner = reported.analysis.winner
    differ = [n for n, value in each.parameters.items() if winner.parameters.get(n) != value]
    return "winner" if each is winner else _label(show_parameters(each.parameters, differ))


def _importance(reported: ReportedRecord) -> Figure:
    ranked = reported.analysis.parameters_by_importance()[:_MAX_BARS]
    title = "% of the importance of all parameters"
    figure = _bars([name for name, _ in ranked], [100 * share for _, share in ranked], title)
    first = f"{ranked[0][0]} matters most." if ranked[0][1] else "No parameter stands out."
    text = (
        f"{first} Method: PED-ANOVA (Watanabe et al., IJCAI 2023). A parameter is important if its "
        "values in the fastest configs differ from its values in all configs. The difference that "
        "chance would cause is subtracted."
    )
    return Figure("Importance of parameters (PED-ANOVA)", text, *figure)


def _cost_of_values(reported: ReportedRecord) -> Figure:
    analysis = reported.analysis
    costs = [
        (f"{name}={value}", 100 * cost)
        for name in analysis.varying
        for value, cost in analysis.slowdown_by_value(name).items()
    ]
    most_expensive = sorted(costs, key=lambda each: -each[1])[:_MAX_BARS]
    negligible = sum(cost <= 1 for _, cost in costs)
    text = (
        "Cost of a value: how much slower the fastest config with this value is than the winner. "
        f"{negligible} of {len(costs)} values cost 1 % or less. "
        f"The {len(most_expensive)} most expensive values are shown."
    )
    names, values = [name for name, _ in most_expensive], [cost for _, cost in most_expensive]
    return Figure("Cost of fixing a value", text, *_bars(names, values, "% slower than the winner"))


def _phases(reported: ReportedRecord) -> Figure:
    spent = {name: reported.phases[name] for name in _PHASES if name in reported.phases}
    text = "Seconds: " + ", ".join(f"{name} {value:.3g}" for name, value in spent.items()) + "."
    return Figure("Time spent", text, *_bars([*spent], [*spent.values()], "seconds"))


def _changes_since_older(reported: ReportedRecord) -> Figure:
    changes = reported.changes
    assert changes is not None
    row_of = {each.trial.digest: row for row, each in enumerate(reported.analysis.timed)}
    old, new = ([pair[side].ms for pair in changes.common] for side in (0, 1))
    digests = [now.trial.digest for _, now in changes.common]
    rows = [row_of[digest] for digest in digests]
    data = [_points(old, new, _MAIN, "config in both", rows)]
    for name, colour, digest in (
        ("older winner", _DEFAULT, changes.before.winner.trial.digest),
        ("winner now", _WINNER, changes.after.winner.trial.digest),
    ):
        for at in [at for at, each in enumerate(digests) if each == digest]:
            data.append(_points([old[at]], [new[at]], colour, name, [rows[at]], 12))
    layout = _layout("ms in the older record", "ms now", x=old, y=new)
    first, last = min(*old, *new), max(*old, *new)
    layout["shapes"] = [_line(x0=first, y0=first, x1=last, y1=last)]
    text = f"{len(old)} configs in both records. On the dashed line, the times are equal."
    return Figure("Since the older record", text, data, layout)


def history(reported_records: Sequence[ReportedRecord]) -> Figure:
    """Return the figure of the winners' times over all tunings of each record's key."""
    data = []
    for reported in reported_records:
        past, key = reported.history, reported.stored.record.key
        first = max(past[0].ms, 1e-9)
        data.append({
            "type": "scatter", "mode": "lines+markers",
            "name": _label(f"{key.function_name} {key}"),
            "x": [each.time for each in past], "y": [each.ms / first for each in past],
            "text": [f"{each.ms:.5g} ms {escape(each.winner)}" for each in past],
            "hovertemplate": "%{text}<br>%{y:.3f}x",
        })  # fmt: skip
    layout = _layout("end of the tuning", "winner's time / first winner's time")
    layout["xaxis"] |= {"type": "date", "rangemode": "normal"}
    layout["yaxis"] |= {"rangemode": "tozero"}
    text = "The winner's time in each tuning, relative to the first tuning of the key."
    return Figure("History", text, data, layout)


def _points(
    x: Sequence[float], y: Sequence[float], colour: str, name: str, rows: Sequence[int],
    size: int = 6, symbol: str = "circle",
) -> dict[str, Any]:  # fmt: skip
    return {
        "type": "scattergl" if len(x) > _MIN_WEBGL_POINTS else "scatter",
        "mode": "markers", "name": name,
        "x": [round(each, 5) for each in x], "y": [round(each, 5) for each in y],
        "marker": {"color": colour, "size": size, "symbol": symbol},
        "unselected": {"marker": {"opacity": 0.05}}, "customdata": rows,
    }  # fmt: skip


def _bars(
    names: Sequence[str], values: Sequence[float], title: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return data and layout of horizontal bars, the first at the top."""
    bars = {"type": "bar", "orientation": "h", "y": [_label(name) for name in names], "x": values,
            "marker": {"color": _MAIN}, "text": [f"{value:.3g}" for value in values],
            "textposition": "outside", "cliponaxis": False,
            "hovertemplate": "%{y}: %{x:.4g}<extra></extra>"}  # fmt: skip
    layout = _layout(title, "")
    layout["margin"] |= {"r": 45}
    layout["yaxis"] |= {"autorange": "reversed", "type": "category"}
    return [bars], layout


def _layout(
    x_title: str, y_title: str, x: Sequence[float] = (), y: Sequence[float] = ()
) -> dict[str, Any]:
    """Return the layout of a plot. If ``x`` or ``y`` is given, and its largest value exceeds its
    smallest by a factor of ``_MIN_LOGARITHMIC_RATIO``, this axis is logarithmic."""
    layout: dict[str, Any] = {
        "height": 370, "margin": {"l": 50, "r": 10, "t": 30, "b": 40},
        "paper_bgcolor": _TRANSPARENT_COLOR, "plot_bgcolor": _TRANSPARENT_COLOR,
        "legend": {"orientation": "h", "y": -0.27},
        "modebar": {"bgcolor": _TRANSPARENT_COLOR, "color": "#8d8d8d", "activecolor": _MAIN},
    }  # fmt: skip
    for name, title, values in (("xaxis", x_title, x), ("yaxis", y_title, y)):
        # Times and ratios are positive, so an axis must not extend below 0.
        colors = {"gridcolor": _GRID_COLOR, "zerolinecolor": _GRID_COLOR}
        layout[name] = {"title": {"text": title}, **colors,
                        "rangemode": "nonnegative", "automargin": True}  # fmt: skip
        if values and min(values) > 0 and max(values) > _MIN_LOGARITHMIC_RATIO * min(values):
            layout[name] |= {"type": "log", "dtick": "D2", "tickformat": "~g"}
    return layout


_TRANSPARENT_COLOR = "rgba(0,0,0,0)"


def _line(**ends: Any) -> dict[str, Any]:
    return {"type": "line", "line": {"color": _WINNER, "width": 1, "dash": "dash"}, **ends}


def _label(text: str) -> str:
    """Return the start of a text from a record, escaped, because plotly interprets HTML tags."""
    return escape(
        text if len(text) <= _MAX_LABEL_LENGTH else f"{text[: _MAX_LABEL_LENGTH - 3]}...",
        quote=False,
    )
