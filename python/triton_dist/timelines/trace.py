"""Read, annotate and merge Chrome traces of ranks. A merged trace has the times of one clock."""

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
"""Key of the metadata of this package: in ``args`` of an event, of a call (op, shape, times); in a
trace, of the rank (such as ``clock_ns``, the offset from its clock to the first rank's clock)."""
COPIED_BYTES = "bytes"
"""Key of the size of a copy in ``args`` of an event, as in the events of torch's profiler."""
_LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
_COPY_CATEGORY = "gpu_memcpy"
_DEVICE_CATEGORIES = ("kernel", _COPY_CATEGORY, "gpu_memset")
_SCOPE_CATEGORY, _DEVICE_SCOPE_CATEGORY = "user_annotation", "gpu_user_annotation"


# The value of "name", up to the end of its line or the next key.
_NAME = re.compile(r'("name": ")(.*)("(?:,\s*"pid":|,?$))', re.MULTILINE)
_UNESCAPED_QUOTE = re.compile(r'(?<!\\)"')


def read(file: Path) -> Trace:
    """Read a trace from a JSON file. Quotes in names that torch has not escaped are accepted.

    Raises:
        ValueError: the file is not JSON.
    """
    data = file.read_bytes()
    text = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", "replace")
    try:
        trace: Trace = json.loads(text, strict=False)
    except ValueError:
        escaped = _NAME.sub(
            lambda found: found[1] + _UNESCAPED_QUOTE.sub(r"\"", found[2]) + found[3], text
        )
        trace = json.loads(escaped, strict=False)
    return trace


def write(trace: Mapping[str, Any], file: Path) -> None:
    """Write ``trace`` atomically, compressed if the name ends in ``.gz``."""
    data = json.dumps(trace).encode()
    _files.write(file, gzip.compress(data) if file.suffix == ".gz" else data)


class Span(NamedTuple):
    """The time that a scope takes on the device, in microseconds of the trace's clock."""

    event: Event
    """Event of the scope."""
    begin: float
    end: float
    on_device: bool
    """False: the scope has no device events, so ``begin`` and ``end`` are host times."""


def spans(trace: Trace, names: Container[str]) -> dict[str, Span]:
    """Return the span of each scope in ``names``, by name.

    The span covers the kernels that the scope's thread launched in the scope, found by the
    profiler's correlation ids. It also covers the device events that the profiler records under the
    scope's name, which include copies. Without device events, as on CPU ranks, the span is the
    scope's time on the host.
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
            launched.setdefault((event["pid"], event["tid"]), []).append((event["ts"], correlation))
    found = {}
    for event in events:
        name = str(event.get("name"))
        if event.get("cat") != _SCOPE_CATEGORY or name not in names:
            continue
        begin, end = event["ts"], event["ts"] + event["dur"]
        covered = [
            each
            for launch_us, correlation in launched.get((event["pid"], event["tid"]), [])
            if begin <= launch_us <= end
            for each in device_events.get(correlation, [])
        ]
        covered += scope_events.get(name, [])
        if covered:
            begin = min(each["ts"] for each in covered)
            end = max(each["ts"] + each["dur"] for each in covered)
        found[name] = Span(event, begin, end, bool(covered))
    return found


def call_title(metadata: Mapping[str, Any]) -> str:
    """Return the title of a call on a timeline: op and shape."""
    return " ".join(filter(None, (metadata["op"], metadata.get("shape"))))


def annotate(trace: Trace, calls: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the metadata and the device time of each call to its event, and set the event's title.

    Args:
        calls: metadata of each call, by the name of its scope, which ends in ``#<number>``.
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
            event["name"] = call_title(calls[name])


def merge(traces: Sequence[tuple[int, Trace]]) -> Trace:
    """Merge the traces of ranks, in the given order, into one trace on the first rank's clock.

    ``clock_ns`` in a rank's metadata is added to the times of the rank's events. Their process ids
    are prefixed with ``rank-<r>``. If a rank has run several programs one after another, the calls
    of the first program have ``run`` 0, the calls of the second program ``run`` 1, and so on.
    Arrows from the set of a flag to the waits for the flag, and counters of transfer rates, are
    added.
    """
    events: list[Event] = []
    ranks: list[dict[str, Any]] = []
    flags: list[dict[str, Any]] = []
    first = traces[0][1]
    base = first.get("baseTimeNanoseconds", 0)
    for rank, trace in traces:
        run = sum(each["rank"] == rank for each in ranks)
        metadata = dict(trace.get(METADATA_KEY, {}))
        shift_us = (trace.get("baseTimeNanoseconds", 0) - base + metadata.get("clock_ns", 0)) / 1e3
        for event in metadata.pop("flags", ()):
            flags.append(
                {**event, "pid": f"rank-{rank} {event['pid']}", "ts": event["ts"] + shift_us}
            )
        ranks.append({"rank": rank, **metadata})
        first_event = len(events)
        for event in trace["traceEvents"]:
            shifted_event = dict(event)
            if "pid" in event:
                shifted_event["pid"] = f"rank-{rank} {event['pid']}"
            if "ts" in event:
                shifted_event["ts"] = event["ts"] + shift_us
            if METADATA_KEY in event.get("args", {}):
                call = event["args"][METADATA_KEY]
                begin = {"begin_us": call["begin_us"] + shift_us}
                shifted_event["args"] = {
                    **event["args"],
                    METADATA_KEY: {**call, **begin, "rank": rank, "run": run},
                }
            events.append(shifted_event)
        events += _counters(f"rank-{rank} transfers", events[first_event:])
    events += _arrows(flags)
    rest = {key: value for key, value in first.items() if key not in ("traceEvents", METADATA_KEY)}
    return {**rest, METADATA_KEY: {"format": 1, "ranks": ranks}, "traceEvents": events}


def _arrows(flags: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    """Yield an arrow ("flow" in Perfetto) from the set of a flag to each wait that the set ends.

    Flags count up: the first set to the awaited value, or to a larger value, ends a wait. Perfetto
    draws an arrow from the slice that begins first, but a wait may begin before the set. Therefore
    arrows end in an additional slice "flag seen", from the last set of an awaited flag to the end
    of the wait. Sets in the row of the wait, and sets after the end of the wait (by an error of the
    clocks), have no arrow.
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
            ending = (each for each in sets.get(flag["flag"], ()) if each["value"] >= flag["value"])
            first_set = next(ending, None)
            if first_set is None or first_set["ts"] >= end:
                continue
            if (first_set["pid"], first_set["tid"]) != (pid, tid):
                arrows.append(first_set)
        if not arrows:
            continue
        last = max(awaited[0]["begin"], ends.get((pid, tid), 0.0), *(each["ts"] for each in arrows))
        ends[pid, tid] = end
        row = {"cat": "flag", "pid": pid, "tid": tid}
        yield {
            "ph": "X", "name": "flag seen", "ts": last, "dur": end - last, **row,
            "args": {"flags": [each["flag"] for each in arrows]},
        }  # fmt: skip
        for first_set in arrows:
            number += 1
            common_fields = {"cat": "flag", "name": first_set["flag"], "id": number}
            yield {
                "ph": "s",
                **common_fields,
                **{key: first_set[key] for key in ("pid", "tid", "ts")},
            }
            yield {"ph": "f", "bp": "e", **common_fields, **row, "ts": (last + end) / 2}


def _counters(process: str, events: Iterable[Event]) -> Iterator[Event]:
    """Yield counter events: the GB/s of copies, and each call's mean GB/s to other ranks. The rates
    of simultaneous transfers with equal names are added."""
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
            if begin < begin + us:  # false also for a duration that rounding removes
                rate = nbytes / us / 1e3
                changes.setdefault(name, []).extend([(begin, rate), (begin + us, -rate)])
    for name, steps in changes.items():
        active: list[float] = []
        for time_us, rate in sorted(steps):
            active.append(rate) if rate > 0 else active.remove(-rate)
            # Perfetto 52 misreads numbers of more than 18 decimals.
            yield {
                "ph": "C", "cat": "transfer", "name": name, "pid": process, "ts": time_us,
                "args": {"GB/s": float(f"{sum(active):.6g}")},
            }  # fmt: skip


def metadata_of_calls(trace: Trace) -> list[dict[str, Any]]:
    """Return the metadata of all calls of tuned functions in a trace."""
    found = (event.get("args", {}).get(METADATA_KEY) for event in trace["traceEvents"])
    return [metadata for metadata in found if metadata is not None]


def clock_offsets(readings: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """Return for each rank the offset from its clock to the first rank's clock, in nanoseconds.

    For ranks on the host of the first rank, the offset is 0. For other ranks it is the median
    difference of the readings.

    Args:
        readings: host and clock readings of each rank. All ranks take a reading after each of
            several barriers.
    """
    first_host, first = readings[0]
    offsets = []
    for host, clock in readings:
        differences = sorted(a - b for a, b in zip(first, clock, strict=True))
        is_known = host == first_host or not differences
        offsets.append(0 if is_known else differences[len(differences) // 2])
    return offsets
