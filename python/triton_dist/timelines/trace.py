"""Read, annotate and merge Chrome traces of ranks; a merged trace has one clock."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from triton_dist import _files

Trace: TypeAlias = dict[str, Any]
Event: TypeAlias = dict[str, Any]

METADATA_KEY = "triton_dist"
"""Key of what this package adds. In ``args`` of an event: the facts of the call (op, shape, times).
In a trace: the facts of the rank (such as ``clock_ns``)."""
COPIED_BYTES = "bytes"
"""Key in ``args`` of a copy, as in the profiler's events."""
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_COPY_CATEGORY = "gpu_memcpy"
_DEVICE_CATEGORIES = ("kernel", _COPY_CATEGORY, "gpu_memset")
_SCOPE_CATEGORY, _DEVICE_SCOPE_CATEGORY = "user_annotation", "gpu_user_annotation"


# A name, up to the end of its line or the next key.
_NAME = re.compile(r'("name": ")(.*)("(?:,\s*"pid":|,?$))', re.MULTILINE)
_QUOTE = re.compile(r'(?<!\\)"')


def read(file: Path) -> Trace:
    """Return a trace; escape quotes in names of scopes and threads, which torch does not escape.

    Raises:
        ValueError: the file is not JSON.
    """
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", "replace")
    try:
        trace: Trace = json.loads(text, strict=False)
    except ValueError:
        escaped = _NAME.sub(lambda found: found[1] + _QUOTE.sub(r"\"", found[2]) + found[3], text)
        trace = json.loads(escaped, strict=False)
    return trace


def write(trace: Mapping[str, Any], file: Path) -> None:
    """Write ``trace`` atomically, compressed if the name ends in ``.gz``."""
    data = json.dumps(trace).encode()
    _files.write(file, gzip.compress(data) if file.suffix == ".gz" else data)


class Span(NamedTuple):
    """Start and end in microseconds of a trace."""

    event: Event
    begin: float
    end: float
    on_device: bool


def spans(trace: Trace, names: Container[str]) -> dict[str, Span]:
    """Return the device time span of each scope in ``names``.

    The span covers the kernels that the scope's thread launched (by the profiler's correlation
    ids) and the device events that the profiler records under the scope's name, which include
    copies. Without device events, as on CPU ranks, the span is the scope itself.
    """
    events: list[Event] = trace["traceEvents"]
    device_events: dict[Any, list[Event]] = {}
    launched: dict[Any, list[tuple[float, Any]]] = {}
    scope_events: dict[str, list[Event]] = {}
    for event in events:
        if event.get("cat") == _DEVICE_SCOPE_CATEGORY:
            scope_events.setdefault(str(event["name"]), []).append(event)
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None and event.get("cat") in _DEVICE_CATEGORIES:
            device_events.setdefault(correlation, []).append(event)
        elif correlation is not None and event.get("cat") in _LAUNCH_CATEGORIES:
            thread = (event["pid"], event["tid"])
            launched.setdefault(thread, []).append((event["ts"], correlation))
    found = {}
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") != _SCOPE_CATEGORY or name not in names:
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        of_thread = launched.get((event["pid"], event["tid"]), [])
        covered = [
            each
            for at, which in of_thread
            if begin <= at <= end
            for each in device_events.get(which, [])
        ]
        covered += scope_events.get(name, [])
        if covered:
            begin = min(each["ts"] for each in covered)
            end = max(each["ts"] + each["dur"] for each in covered)
        found[name] = Span(event, begin, end, bool(covered))
    return found


def title_of(facts: Mapping[str, Any]) -> str:
    """Return the name of a call on a timeline."""
    return " ".join(filter(None, (facts["op"], facts.get("shape"))))


def annotate(trace: Trace, calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the facts and the device time of each call to its event, and set the event's title.

    Args:
        calls: facts of each call, by the name of its scope, which ends in ``#<number>``.
    """
    for name, (event, begin, end, on_device) in spans(trace, calls).items():
        number = int(name.rpartition("#")[2])
        device = {"begin_us": begin, "ms": (end - begin) / 1e3, "on_device": on_device}
        event["args"] = {
            **event.get("args", {}),
            METADATA_KEY: {"call": number, **calls[name], **device},
        }
    for event in trace["traceEvents"]:
        name = str(event.get("name"))
        if event.get("cat") in (_SCOPE_CATEGORY, _DEVICE_SCOPE_CATEGORY) and name in calls:
            event["name"] = title_of(calls[name])


def merge(traces: Sequence[tuple[int, Trace]]) -> Trace:
    """Merge the traces of ranks, in this order, into one trace on the first rank's clock.

    Add the ``clock_ns`` in the facts of each rank to the times of the rank. Prefix its process ids
    with ``rank-<r>``. If a rank has run several programs one after another, the calls of the second
    program have ``run`` 1, and so on. Add the arrows of flags and counters of transfers.
    """
    events: list[Event] = []
    ranks: list[dict[str, Any]] = []
    flags: list[dict[str, Any]] = []
    first = traces[0][1]
    base = first.get("baseTimeNanoseconds", 0)
    for rank, trace in traces:
        run = sum(each["rank"] == rank for each in ranks)
        facts = dict(trace.get(METADATA_KEY, {}))
        shift = (trace.get("baseTimeNanoseconds", 0) - base + facts.get("clock_ns", 0)) / 1e3
        for event in facts.pop("flags", ()):
            pid = f"rank-{rank} {event['pid']}"
            flags.append({**event, "pid": pid, "ts": event["ts"] + shift})
        ranks.append({"rank": rank, **facts})
        first_event = len(events)
        for event in trace["traceEvents"]:
            moved = dict(event)
            if "pid" in event:
                moved["pid"] = f"rank-{rank} {event['pid']}"
            if "ts" in event:
                moved["ts"] = event["ts"] + shift
            if METADATA_KEY in event.get("args", {}):
                call = event["args"][METADATA_KEY]
                begin = {"begin_us": call["begin_us"] + shift}
                moved["args"] = {
                    **event["args"],
                    METADATA_KEY: {**call, **begin, "rank": rank, "run": run},
                }
            events.append(moved)
        events += _counters(f"rank-{rank} transfers", events[first_event:])
    events += _arrows(flags)
    rest = {
        name: value for name, value in first.items() if name not in ("traceEvents", METADATA_KEY)
    }
    return {**rest, METADATA_KEY: {"format": 1, "ranks": ranks}, "traceEvents": events}


def _arrows(flags: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Yield a flow from the set of a flag to each wait for its value, in another row.

    Flags count up: the first set to the awaited value or above ends a wait. Perfetto directs a flow
    by the begins of its two slices, and a wait may begin before the set. The flows of a wait
    therefore end in a slice "flag seen", from the last set to the end of the wait. A wait that ends
    before the set, by an error of the clocks, has no flow.
    """
    sets: dict[str, list[Mapping[str, Any]]] = {}
    waits: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for flag in sorted(flags, key=lambda each: float(each["ts"])):
        if flag["is_set"]:
            sets.setdefault(flag["flag"], []).append(flag)
        else:
            waits.setdefault((flag["pid"], flag["tid"], flag["ts"]), []).append(flag)
    number, ends = 0, dict[tuple[Any, ...], float]()
    for (pid, tid, end), awaited in waits.items():
        arrows = []
        for flag in awaited:
            enough = (each for each in sets.get(flag["flag"], ()) if each["value"] >= flag["value"])
            begin = next(enough, None)
            if begin and begin["ts"] < end and (begin["pid"], begin["tid"]) != (pid, tid):
                arrows.append(begin)
        if not arrows:
            continue
        last = max(awaited[0]["begin"], ends.get((pid, tid), 0.0), *(each["ts"] for each in arrows))
        ends[pid, tid] = end
        row = {"cat": "flag", "pid": pid, "tid": tid}
        seen = [each["flag"] for each in arrows]
        yield {
            "ph": "X", "name": "flag seen", "ts": last, "dur": end - last, **row,
            "args": {"flags": seen},
        }  # fmt: skip
        for begin in arrows:
            number += 1
            about = {"cat": "flag", "name": begin["flag"], "id": number}
            yield {"ph": "s", **about, **{key: begin[key] for key in ("pid", "tid", "ts")}}
            yield {"ph": "f", "bp": "e", **about, **row, "ts": (last + end) / 2}


def _counters(process: str, events: Iterable[Event]) -> Iterator[Event]:
    """Yield the GB/s of copies, and the mean GB/s to other ranks during each call, over time.

    Transfers of the same name that overlap add up.
    """
    changes: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        args = event.get("args", {})
        transfers = []
        if COPIED_BYTES in args and event.get("cat") in (_COPY_CATEGORY, "mark"):
            name = event["name"] if event["cat"] == _COPY_CATEGORY else "copy stream"
            transfers.append((name, event["ts"], event["dur"], args[COPIED_BYTES]))
        call = args.get(METADATA_KEY, {})
        if call.get("link_bytes"):
            name = f"{call['op']} to other ranks, mean"
            transfers.append((name, call["begin_us"], call["ms"] * 1e3, call["link_bytes"]))
        for name, begin, us, nbytes in transfers:
            if begin < begin + us:
                rate = nbytes / us / 1e3
                changes.setdefault(name, []).extend([(begin, rate), (begin + us, -rate)])
    for name, steps in changes.items():
        active: list[float] = []
        for at, rate in sorted(steps):
            active.append(rate) if rate > 0 else active.remove(-rate)
            # Perfetto 52 misreads numbers of more than 18 decimals.
            total = float(f"{sum(active):.6g}")
            yield {
                "ph": "C", "cat": "transfer", "name": name, "pid": process, "ts": at,
                "args": {"GB/s": total},
            }  # fmt: skip


def calls_of(trace: Trace) -> list[dict[str, Any]]:
    """Return the facts of all calls of tuned functions in a merged trace."""
    found = (event.get("args", {}).get(METADATA_KEY) for event in trace["traceEvents"])
    return [facts for facts in found if facts is not None]


def clock_offsets(readings: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return the nanoseconds to add to each rank's clock to get the first rank's clock.

    Ranks of one host share a clock. For another host, return the median difference.

    Args:
        readings: for each rank its host and several clock readings, each taken after a barrier.
    """
    host, first = readings[0]
    found = []
    for other, clock in readings:
        differences = sorted(a - b for a, b in zip(first, clock, strict=True))
        found.append(0 if other == host or not differences else differences[len(differences) // 2])
    return found
