"""Add the marks of kernels to a timeline. A mark is a time span within a program of a kernel.

The timeline gets a row for each program, below the calls of ops.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from triton_dist.language._marks import ClockReading
from triton_dist.runtime import addresses
from triton_dist.runtime.device import current_device
from triton_dist.runtime.marking import MARK_NAMES, FlagEvent, Mark, Marks
from triton_dist.timelines import trace

PROCESS_NAME = "marks in kernels"
_CLOCK_SCOPE = "triton_dist: clock of marks"
_PRECISION_NS = 4
"""A trace stores times as floats in microseconds, so times are rounded by a few ns."""
_NUM_READINGS = 5
"""Clock readings at the start and end of a recording. Preemption may delay single readings."""


@contextmanager
def compile_with_marks() -> Iterator[None]:
    """Context manager for the call before the first recorded call. Kernels are compiled with marks
    in this call, and its marks are discarded."""
    device, marks = current_device(), KernelMarks()
    with marks.around_call():
        yield
    if not device.is_capturing():
        device.synchronize()  # all later marks belong to recorded calls


class KernelMarks:
    """The marks of a recording, and readings of the device clock with which marks are made."""

    def __init__(self) -> None:
        device = current_device()
        self._marks = Marks(None if device.interprets else device.torch_device)
        self._readings: dict[str, ClockReading] = {}
        ClockReading().nanoseconds()  # compile before recording

    def read_clock(self) -> None:
        """Read the device clock in profiler scopes. The times of these scopes relate the clock to
        the timeline."""
        for _ in range(_NUM_READINGS):
            name = f"{_CLOCK_SCOPE} #{len(self._readings)}"
            with torch.profiler.record_function(name):
                self._readings[name] = ClockReading()
            current_device().synchronize()

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Context manager in which kernels make marks, except in a CUDA graph capture: the graph
        would make marks at every replay."""
        if current_device().is_capturing():
            yield
            return
        with self._marks.on():
            yield

    def add_to(self, content: trace.Trace) -> None:
        """Add the marks to ``content``, this rank's timeline. Add the share of each mark in the
        time of programs to the metadata of calls."""
        stored, num_made = self._marks.read()
        marks = [each for each in stored if isinstance(each, Mark)]
        flags = [each for each in stored if isinstance(each, FlagEvent)]
        # Relate the marks' clock to the timeline by the reading whose scope took the least time.
        spans = trace.spans(content, self._readings)
        name = min(spans, key=lambda each: spans[each].end - spans[each].begin)
        middle_us = (spans[name].begin + spans[name].end) / 2
        trace_start_ns = self._readings[name].nanoseconds() - int(middle_us * 1e3)
        for metadata in trace.metadata_of_calls(content):
            begin_ns = trace_start_ns + metadata["begin_us"] * 1e3
            end_ns = begin_ns + metadata["ms"] * 1e6
            metadata["marks"] = mark_shares([m for m in marks if begin_ns <= m.begin_ns <= end_ns])
        rows = _rows(marks)
        content["traceEvents"] += _trace_events(rows, trace_start_ns)
        content[trace.METADATA_KEY]["marks"] = {"kept": len(stored), "made": num_made}
        content[trace.METADATA_KEY]["flags"] = [*_flags_in_marks(flags, rows, trace_start_ns)]


_Rows: TypeAlias = dict[tuple[int, int], list[Mark]]
"""Marks by program and group of four warps, sorted by begin. A mark comes before the marks that are
nested in it."""


def _rows(marks: Iterable[Mark]) -> _Rows:
    rows: _Rows = {}
    for mark in sorted(marks, key=lambda each: (each.program, each.begin_ns, -each.end_ns)):
        rows.setdefault((mark.program, mark.warp_group), []).append(mark)
    return dict(sorted(rows.items()))


def mark_shares(marks: list[Mark]) -> dict[str, float]:
    """Return for each name of marks its share of the time of all programs. The time of a program is
    from the begin of its first mark to the end of its last mark. The time of a nested mark counts
    for the mark and for the surrounding mark."""
    rows: dict[tuple[int, int], tuple[int, int]] = {}
    ns_by_name = dict.fromkeys(MARK_NAMES, 0)
    for mark in marks:
        if mark.program < 0:  # a copy stream
            continue
        row = mark.program, mark.warp_group
        begin, end = rows.get(row, (mark.begin_ns, mark.end_ns))
        rows[row] = min(begin, mark.begin_ns), max(end, mark.end_ns)
        ns_by_name[mark.name] += mark.end_ns - mark.begin_ns
    total_ns = sum(end - begin for begin, end in rows.values())
    return {name: ns / total_ns for name, ns in ns_by_name.items() if ns and total_ns}


def _trace_events(rows: _Rows, trace_start_ns: int) -> Iterator[trace.Event]:
    if rows:
        yield _name_event("process_name", 0, PROCESS_NAME)
    for number, ((program, warp_group), marks) in enumerate(rows.items()):
        warps = f", warps {4 * warp_group} to {4 * warp_group + 3}" if warp_group else ""
        name = f"program {program}{warps}" if program >= 0 else f"copy stream {number}"
        yield _name_event("thread_name", number, name)
        for mark in marks:
            event_args: dict[str, Any] = {"program": program, "group": warp_group}
            event_args |= {trace.COPIED_BYTES: mark.nbytes} if mark.nbytes else {}
            yield {
                "ph": "X", "cat": "mark", "name": mark.name, "pid": PROCESS_NAME, "tid": number,
                "ts": (mark.begin_ns - trace_start_ns) / 1e3,
                "dur": (mark.end_ns - mark.begin_ns) / 1e3, "args": event_args,
            }  # fmt: skip


def _flags_in_marks(
    flags: Iterable[FlagEvent], rows: _Rows, trace_start_ns: int
) -> Iterator[dict[str, Any]]:
    """Yield the data for the arrows of ``trace.merge``, for flags whose memory still exists."""
    numbers = {row: number for number, row in enumerate(rows)}
    begins = {row: [mark.begin_ns for mark in marks] for row, marks in rows.items()}
    for flag in flags:
        row, identity = (flag.program, flag.warp_group), addresses.identify(flag.address)
        first = bisect_right(begins.get(row, ()), flag.time_ns)
        earlier = reversed(rows.get(row, ())[:first])
        mark = next((each for each in earlier if each.end_ns >= flag.time_ns), None)
        if mark is not None and identity is not None:
            # An arrow is attached to the event that contains its time, excluding the event's end.
            time_ns = min(flag.time_ns, mark.end_ns - flag.is_set * _PRECISION_NS)
            yield {
                "flag": identity, "is_set": flag.is_set, "value": flag.value,
                "pid": PROCESS_NAME, "tid": numbers[row],
                "begin": (mark.begin_ns - trace_start_ns) / 1e3,
                "ts": (max(time_ns, mark.begin_ns) - trace_start_ns) / 1e3,
            }  # fmt: skip


def _name_event(event_name: str, number: int, name: str) -> trace.Event:
    return {
        "ph": "M",
        "name": event_name,
        "pid": PROCESS_NAME,
        "tid": number,
        "args": {"name": name},
    }
