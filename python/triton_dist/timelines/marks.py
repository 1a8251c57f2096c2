"""Marks inside kernels on a timeline: a row for each program, beneath the calls of ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from triton_dist.language._marks import ClockReading
from triton_dist.runtime.device import current_device
from triton_dist.runtime.marking import NAMES, Mark, Marks
from triton_dist.timelines import trace

PROCESS = "marks in kernels"
_CLOCK = "triton_dist: clock of marks"
_READINGS = 5
"""At the beginning, and at the end; the host's scheduler, or another rank, may be in between."""


@contextmanager
def compiled_with_marks() -> Iterator[None]:
    """Have the kernels of a call compile with marks, which nobody reads; for the calls that are
    recorded next."""
    device, marks = current_device(), KernelMarks()
    with marks.around_call():
        yield
    if not device.is_capturing():
        device.synchronize()  # later marks are of calls that are recorded


class KernelMarks:
    """Marks of a recording, and readings of the clock that they are by."""

    def __init__(self) -> None:
        device = current_device()
        self._marks = Marks(None if device.interprets else device.torch_device)
        self._readings: dict[str, ClockReading] = {}
        ClockReading().nanoseconds()  # compiled now

    def read_clock(self) -> None:
        """Read it in scopes, whose place on the timeline the profiler knows."""
        for _ in range(_READINGS):
            name = f"{_CLOCK} #{len(self._readings)}"
            with torch.profiler.record_function(name):
                self._readings[name] = ClockReading()
            current_device().synchronize()

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Have kernels make marks; not in a CUDA graph, which would go on making them."""
        if current_device().is_capturing():
            yield
            return
        with self._marks.on():
            yield

    def add_to(self, content: trace.Trace) -> None:
        """Put the marks on this rank's timeline, and what they come to into the facts of its
        calls."""
        marks, made = self._marks.read()
        # The clock of marks at the timeline's 0, by the reading whose moment is known best.
        spans = trace.spans(content, self._readings)
        name = min(spans, key=lambda each: spans[each].end - spans[each].begin)
        middle = (spans[name].begin + spans[name].end) / 2
        zero = self._readings[name].nanoseconds() - int(middle * 1e3)
        placed = [
            (mark, (mark.begin_ns - zero) / 1e3, (mark.end_ns - mark.begin_ns) / 1e3)
            for mark in marks
        ]
        for facts in trace.calls_of(content):
            begin, end = facts["begin_us"], facts["begin_us"] + facts["ms"] * 1e3
            facts["marks"] = shares([m for m, at, _ in placed if begin <= at <= end])
        content["traceEvents"] += _events(placed)
        content[trace.SCOPE]["marks"] = {"kept": len(marks), "made": made}


def shares(marks: list[Mark]) -> dict[str, float]:
    """By name, the share of the time of all programs, each from its first mark to its last. What is
    marked within another mark counts for both."""
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    spent = dict.fromkeys(NAMES, 0)
    for mark in marks:
        row = mark.program, mark.group
        begin, end = rows.get(row, (mark.begin_ns, mark.end_ns))
        rows[row] = min(begin, mark.begin_ns), max(end, mark.end_ns)
        spent[mark.name] += mark.end_ns - mark.begin_ns
    whole = sum(end - begin for begin, end in rows.values())
    return {name: ns / whole for name, ns in spent.items() if ns and whole}


def _events(placed: list[tuple[Mark, float, float]]) -> Iterator[trace.Event]:
    rows: Mapping[tuple[int, int], int] = {
        row: number
        for number, row in enumerate(sorted({(mark.program, mark.group) for mark, _, _ in placed}))
    }
    for (program, group), number in rows.items():
        warps = f", warps {4 * group} to {4 * group + 3}" if group else ""
        yield _named("thread_name", number, f"program {program}{warps}")
    if rows:
        yield _named("process_name", 0, PROCESS)
    for mark, begin_us, us in placed:
        about: dict[str, Any] = {"program": mark.program, "group": mark.group}
        number = rows[mark.program, mark.group]
        yield {
            "ph": "X", "cat": "mark", "name": mark.name, "pid": PROCESS, "tid": number,
            "ts": begin_us, "dur": us, "args": about,
        }  # fmt: skip


def _named(what: str, number: int, name: str) -> trace.Event:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": number, "args": {"name": name}}
