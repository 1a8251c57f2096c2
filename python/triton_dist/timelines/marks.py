"""Add marks inside kernels to a timeline: one row per program, below the calls of ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from triton_dist.language._marks import ClockReading
from triton_dist.runtime.device import current_device
from triton_dist.runtime.marking import MARK_NAMES, Mark, Marks
from triton_dist.timelines import trace

PROCESS = "marks in kernels"
_CLOCK = "triton_dist: clock of marks"
_READINGS = 5
"""Number of clock readings at the start and at the end; preemption may disturb a single reading."""


@contextmanager
def compiled_with_marks() -> Iterator[None]:
    """Context manager that compiles the kernels of a call with marks, before recording starts.

    The marks of this call are discarded.
    """
    device, marks = current_device(), KernelMarks()
    with marks.around_call():
        yield
    if not device.is_capturing():
        device.synchronize()  # marks after this belong to recorded calls


class KernelMarks:
    """The marks of a recording, and readings of the clock that the marks use."""

    def __init__(self) -> None:
        device = current_device()
        self._marks = Marks(None if device.interprets else device.torch_device)
        self._readings: dict[str, ClockReading] = {}
        ClockReading().nanoseconds()  # compile before recording

    def read_clock(self) -> None:
        """Read the clock in profiler scopes, which relate it to the timeline."""
        for _ in range(_READINGS):
            name = f"{_CLOCK} #{len(self._readings)}"
            with torch.profiler.record_function(name):
                self._readings[name] = ClockReading()
            current_device().synchronize()

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Context manager in which kernels make marks.

        Not used in CUDA graph capture: the graph would make marks at every replay.
        """
        if current_device().is_capturing():
            yield
            return
        with self._marks.on():
            yield

    def add_to(self, content: trace.Trace) -> None:
        """Add the marks to this rank's timeline, and their shares to the facts of its calls."""
        marks, made = self._marks.read()
        # Offset of the marks' clock to the timeline, from the reading with the shortest scope.
        spans = trace.spans(content, self._readings)
        name = min(spans, key=lambda each: spans[each].end - spans[each].begin)
        middle = (spans[name].begin + spans[name].end) / 2
        trace_start_ns = self._readings[name].nanoseconds() - int(middle * 1e3)
        marks_in_us = [
            (mark, (mark.begin_ns - trace_start_ns) / 1e3, (mark.end_ns - mark.begin_ns) / 1e3)
            for mark in marks
        ]
        for facts in trace.calls_of(content):
            begin, end = facts["begin_us"], facts["begin_us"] + facts["ms"] * 1e3
            facts["marks"] = shares([m for m, at, _ in marks_in_us if begin <= at <= end])
        content["traceEvents"] += _trace_events(marks_in_us)
        content[trace.METADATA_KEY]["marks"] = {"kept": len(marks), "made": made}


def shares(marks: list[Mark]) -> dict[str, float]:
    """Return each mark's share of the time of all programs, by name.

    The time of a program is from its first mark to its last. A nested mark counts for both marks.
    """
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    ns_by_name = dict.fromkeys(MARK_NAMES, 0)
    for mark in marks:
        row = mark.program, mark.group
        begin, end = rows.get(row, (mark.begin_ns, mark.end_ns))
        rows[row] = min(begin, mark.begin_ns), max(end, mark.end_ns)
        ns_by_name[mark.name] += mark.end_ns - mark.begin_ns
    whole = sum(end - begin for begin, end in rows.values())
    return {name: ns / whole for name, ns in ns_by_name.items() if ns and whole}


def _trace_events(marks_in_us: list[tuple[Mark, float, float]]) -> Iterator[trace.Event]:
    rows: Mapping[tuple[int, int], int] = {
        row: number
        for number, row in enumerate(
            sorted({(mark.program, mark.group) for mark, _, _ in marks_in_us})
        )
    }
    for (program, group), number in rows.items():
        warps = f", warps {4 * group} to {4 * group + 3}" if group else ""
        yield _name_event("thread_name", number, f"program {program}{warps}")
    if rows:
        yield _name_event("process_name", 0, PROCESS)
    for mark, begin_us, us in marks_in_us:
        about: dict[str, Any] = {"program": mark.program, "group": mark.group}
        number = rows[mark.program, mark.group]
        yield {
            "ph": "X", "cat": "mark", "name": mark.name, "pid": PROCESS, "tid": number,
            "ts": begin_us, "dur": us, "args": about,
        }  # fmt: skip


def _name_event(what: str, number: int, name: str) -> trace.Event:
    return {"ph": "M", "name": what, "pid": PROCESS, "tid": number, "args": {"name": name}}
