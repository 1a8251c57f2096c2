"""Plots of a tuning: one function per panel."""

from __future__ import annotations

import datetime
import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from triton_dist._tuning.store import events_of
from triton_dist._tuning.values import StoredRecord
from triton_dist._tuning.values.analysis import Analysis, Changes, Timed, shown


class Answer(NamedTuple):
    """One measurement of a tuning."""

    seconds: float
    """Since the start of the tuning."""
    ms: float


@dataclass(frozen=True)
class Subject:
    """A record to draw, and an older record to compare it with."""

    stored: StoredRecord
    older: StoredRecord | None

    @cached_property
    def found(self) -> Analysis:
        return Analysis(self.stored.record)

    @cached_property
    def changes(self) -> Changes | None:
        return self.older and Changes.of(self.older.record, self.stored.record)

    @cached_property
    def answers(self) -> Sequence[Answer]:
        """The measurements in order; empty if the log is missing or the record is shipped."""
        found: list[Answer] = []
        for event in self._events:
            with suppress(KeyError, TypeError, ValueError):
                if event["event"] == "outcome" and "samples" in event:
                    passed = _time(event) - _time(self._events[0])
                    found.append(Answer(passed.total_seconds(), float(event["ms"])))
        return found

    @property
    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase; empty if the log has no phases."""
        phases = self._events[-1].get("phases") if self._events else None
        return phases if isinstance(phases, dict) else {}

    @cached_property
    def _events(self) -> list[dict[str, Any]]:
        record, where = self.stored
        return [] if record.shipped else events_of(Path(where), record.best.digest)


def _time(event: dict[str, Any]) -> datetime.datetime:
    return datetime.datetime.fromisoformat(event["time"])


_POINT, _BEST, _BAR, _ZONE = "#8fa9c4", "#c0392b", "#1f5f99", "#e4efe2"
_PHASES = {
    "compile": "#8a6d1b",
    "measure": "#1f5f99",
    "search": "#7a4a8c",
    "agree": "#6b6b6b",
    "other": "#a0a0a0",
}
_WIDTH, _HEIGHT = 5.6, 3.5
"""Size of a panel in inches; two panels fill the width of a page."""
_BARS, _FINALISTS, _LONGEST = 12, 8, 30
_NEAR = 1.25
"""Largest ratio to the winner in the panel of the fastest configs, if three are below it."""
_WIDE = 4
"""An axis is logarithmic if its largest value exceeds its smallest by this factor."""
_NOTHING = 0.05
"""Per cent; values that cost less are not drawn."""
_ROOM = 5
"""Minimum number of rows in a bar panel; fewer rows would give very thick bars."""
_FEW = 2
"""Configs with at most this number of samples were eliminated early and are drawn faint."""


def panels(subject: Subject) -> list[tuple[str, Callable[[Any, Subject], None]]]:
    """Return the title and the painter of each panel that has data."""
    found = subject.found
    several = len(found.timed) > 1
    all_of_them: list[tuple[str, Callable[[Any, Subject], None], object]] = [
        ("All configs, sorted", _sorted, several),
        ("Convergence", _convergence, subject.answers),
        ("The fastest: all samples", _fastest, several),
        ("Importance of parameters", _importance, found.varying),
        ("Price of fixing a value", _price, found.varying),
        ("Failures by kind", _failures, found.failed),
        ("Since the older record", _since, subject.changes and subject.changes.common),
    ]
    return [(title, painter) for title, painter, wanted in all_of_them if wanted]


def png(subject: Subject) -> bytes:
    """Draw all panels in one picture, two columns wide."""
    key, drawn = subject.stored.record.key, panels(subject)
    rows = math.ceil(len(drawn) / 2)
    with _style():
        figure = Figure(figsize=(2 * _WIDTH, _HEIGHT * rows + 0.7), dpi=100)
        name = _cut(f"{key.full_name}, key {key}", 120)
        if not drawn:
            name = f"{name}: one config was measured, there is nothing to compare"
        figure.suptitle(f"{name}\n{_cut(key.hardware, 100)}", fontsize=11)
        if drawn:
            figure.set_layout_engine("constrained")
            axes = figure.subplots(rows, 2, squeeze=False).flatten()
            for ax in axes[len(drawn) :]:
                ax.set_axis_off()
            for ax, (title, painter) in zip(axes, drawn, strict=False):
                painter(ax, subject)
                _not_below_0(ax)
                ax.set_title(title, fontsize=10.5, loc="left", fontweight="bold")
        written = io.BytesIO()
        figure.savefig(written, format="png")
    return written.getvalue()


def svgs(subject: Subject) -> list[tuple[str, str]]:
    """Return the title and the SVG of each panel. More than 200 points become one raster image."""
    drawn = []
    with _style():
        for title, painter in panels(subject):
            figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
            ax = figure.subplots()
            painter(ax, subject)
            _not_below_0(ax)
            written = io.StringIO()
            figure.savefig(written, format="svg", dpi=150, metadata={"Date": None})
            text = written.getvalue()
            drawn.append((title, text[text.index("<svg") :]))
    return drawn


def _style() -> AbstractContextManager[None]:
    style: AbstractContextManager[None] = matplotlib.rc_context(
        {
            "font.size": 9.5,
            "svg.fonttype": "none",
            "text.parse_math": False,  # a key may have dollars in it
            "axes.spines.top": False,
            "axes.spines.right": False,
        }
    )
    return style


def _sorted(ax: Any, subject: Subject) -> None:
    found = subject.found
    ratios = [found.ratio(each.ms) for each in found.timed]
    rough = [len(each.samples) <= _FEW for each in found.timed]
    for few, colour, label in (
        (True, _POINT, f"{_FEW} samples or fewer"),
        (False, _BAR, "more samples"),
    ):
        places = [place + 1 for place, is_rough in enumerate(rough) if is_rough == few]
        if places:
            times = [ratios[place - 1] for place in places]
            ax.scatter(places, times, s=9, color=colour, label=label, rasterized=len(places) > 200)
    ax.axhline(1.01, color=_BEST, linewidth=1, linestyle="--", label="1 % behind the winner")
    _log_if_wide(ax.set_yscale, ax.yaxis, ratios)
    ax.set(xlabel=f"config, of {len(ratios)} measured", ylabel="time / winner's")
    counts = ", ".join(f"{found.within(p / 100)} within {p} %" for p in (1, 5, 10))
    ax.legend(loc="upper left", fontsize=8.5, title=counts, title_fontsize=9, alignment="left")


def _convergence(ax: Any, subject: Subject) -> None:
    answers = subject.answers
    seconds, times = [each.seconds for each in answers], [each.ms for each in answers]
    many = len(answers) > 200
    ax.scatter(seconds, times, s=9, color=_POINT, rasterized=many, label="an answer")
    lowest = [min(times[:1])]
    for ms in times[1:]:
        lowest.append(min(lowest[-1], ms))
    ax.step(seconds, lowest, where="post", color=_BEST, linewidth=1.5, label="lowest so far")
    _log_if_wide(ax.set_yscale, ax.yaxis, times)
    ax.set(xlabel="seconds since the tuning began", ylabel="ms")
    ax.legend(loc="upper right", fontsize=8.5)
    spent = {name: value for name, value in subject.phases.items() if name in _PHASES}
    whole = sum(spent.values())
    if whole <= 0:
        return
    strip, left = ax.inset_axes((0, 1.02, 1, 0.07)), 0.0
    for name, value in spent.items():
        strip.barh([0], [value], left=[left], color=_PHASES[name])
        if value > whole / 6:
            strip.text(
                left + value / 2, 0, f"{name} {value:.3g} s", color="white",
                ha="center", va="center_baseline", fontsize=8.5, in_layout=False,
            )  # fmt: skip
        left += value
    strip.set_axis_off()
    strip.set(xlim=(0, whole), ylim=(-0.4, 0.4))
    seconds_of = ", ".join(f"{name} {value:.3g}" for name, value in spent.items())
    ax.set_xlabel(f"seconds; spent: {seconds_of}")


def _fastest(ax: Any, subject: Subject) -> None:
    found = subject.found
    near = [each for each in found.timed if found.ratio(each.ms) <= _NEAR]
    best = (near if len(near) > 2 else list(found.timed[:3]))[:_FINALISTS]
    ax.axvspan(1, 1.01, color=_ZONE, label="within 1 %")
    for place, each in enumerate(best):
        ratios = [found.ratio(sample) for sample in each.samples]
        colour = _POINT if len(each.samples) <= _FEW else _BAR
        colour = _BEST if each is found.winner else colour
        ax.scatter(ratios, [place] * len(ratios), s=16, color=colour, alpha=0.7, linewidths=0)
        ax.plot([found.ratio(each.ms)] * 2, [place - 0.2, place + 0.2], color="black", linewidth=1)
        ax.text(
            0.01, place - 0.36, _beside_winner(subject, each), fontsize=7.5, color="#555555",
            va="center", transform=ax.get_yaxis_transform(), in_layout=False,
        )  # fmt: skip
    ax.set_yticks(range(len(best)), [f"#{place + 1}" for place in range(len(best))])
    ax.set_ylim(max(len(best), _ROOM) + 0.4, -0.7)
    last = 1.02 + 2 * (max(found.ratio(each.ms) for each in best) - 1)
    samples = [found.ratio(sample) for each in best for sample in each.samples]
    beyond = sum(sample > last for sample in samples)
    ax.set_xlim(right=min(last, max(*samples, 1.01) + 0.005))
    ax.set_xlabel("sample / winner's median; line: median" + f"; {beyond} beyond" * bool(beyond))
    ax.legend(loc="lower right", fontsize=8.5)


def _beside_winner(subject: Subject, each: Timed) -> str:
    """Return the parameters in which a config differs from the winner."""
    winner = subject.found.winner
    if each is winner:
        return "winner"
    differ = [n for n, value in each.parameters.items() if winner.parameters.get(n) != value]
    return _cut(shown(each.parameters, differ), 2 * _LONGEST)


def _importance(ax: Any, subject: Subject) -> None:
    ranked = subject.found.ranked()[:_BARS]
    _bars(ax, [name for name, _ in ranked], [100 * share for _, share in ranked], "{:.0f} %")
    left = max(0.0, 1 - sum(share for _, share in subject.found.ranked()))
    ax.set_xlabel(f"% of the variance of log time, alone; {left:.0%} is joint, or noise")


def _price(ax: Any, subject: Subject) -> None:
    found = subject.found
    prices = [
        (f"{name}={value}", 100 * price)
        for name in found.varying
        for value, price in found.price(name).items()
    ]
    costly = [each for each in prices if each[1] >= _NOTHING] or prices
    dearest = sorted(costly, key=lambda each: -each[1])[:_BARS]
    _bars(ax, [name for name, _ in dearest], [price for _, price in dearest], "{:+.3g} %")
    free = len(prices) - sum(price > 1 for _, price in prices)
    ax.set_xlabel(f"% behind the winner, at best; {free} of {len(prices)} values cost 1 % or less")
    if dearest[0][1] > 50:
        ax.set_xscale("symlog", linthresh=10)
        _plain_numbers(ax.xaxis)


def _failures(ax: Any, subject: Subject) -> None:
    failed, tried = subject.found.failed, len(subject.stored.record.trials)
    _bars(ax, [each.kind for each in failed], [each.count for each in failed], "{:.0f}")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel(f"configs, of {tried} in all")


def _since(ax: Any, subject: Subject) -> None:
    changes = subject.changes
    assert changes is not None
    pairs = [(old.ms, new.ms) for old, new in changes.common]
    ax.scatter(*zip(*pairs, strict=True), s=9, color=_POINT, rasterized=len(pairs) > 200)
    for marker, colour, label, digest in (
        ("o", "black", "older winner", changes.before.winner.trial.digest),
        ("D", _BEST, "winner now", changes.after.winner.trial.digest),
    ):
        there = [(old.ms, new.ms) for old, new in changes.common if new.trial.digest == digest]
        for x, y in there:
            ax.scatter([x], [y], s=60, marker=marker, facecolors="none", edgecolors=colour,
                       label=label, linewidths=1.6)  # fmt: skip
    ax.axline(
        (pairs[0][0],) * 2, slope=1, color="gray", linewidth=1, linestyle=":", label="as fast"
    )
    _log_if_wide(ax.set_xscale, ax.xaxis, [old for old, _ in pairs])
    _log_if_wide(ax.set_yscale, ax.yaxis, [new for _, new in pairs])
    ax.set(xlabel=f"ms in the older record; {len(pairs)} configs in both", ylabel="ms now")
    ax.legend(loc="lower right", fontsize=8.5)


def _bars(ax: Any, names: list[str], values: list[float], label: str) -> None:
    """Draw horizontal bars with their values, the first at the top."""
    bars = ax.barh(range(len(names)), values, color=_BAR)
    ax.bar_label(bars, [label.format(value) for value in values], padding=3, fontsize=8.5)
    ax.set_yticks(range(len(names)), [_cut(name, _LONGEST) for name in names], fontsize=8.5)
    ax.set_ylim(max(len(names), _ROOM) - 0.5, -0.6)
    ax.margins(x=0.15)


def _log_if_wide(set_scale: Callable[[str], object], axis: Any, values: Sequence[float]) -> None:
    """Use a logarithmic axis if the values differ by more than a factor of ``_WIDE``."""
    if min(values) > 0 and max(values) > _WIDE * min(values):
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        _plain_numbers(axis)


def _not_below_0(ax: Any) -> None:
    """End an axis at 0 if only its margin is negative: times and ratios are positive."""
    bounds = ax.dataLim
    if ax.get_xlim()[0] < 0 <= bounds.x0:
        ax.set_xlim(left=0)
    if ax.get_ylim()[0] < 0 <= bounds.y0:
        ax.set_ylim(bottom=0)


def _plain_numbers(axis: Any) -> None:
    """Label ticks 1, 2, 5 and 10 instead of powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
