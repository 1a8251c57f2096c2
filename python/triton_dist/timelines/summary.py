"""Summarise the time, the rates and the limiting resource of each op on a timeline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class OpSummary:
    """The summary of all calls of one op with one shape in one program.

    Attributes:
        run: index of the program, if ranks have run several programs one after another.
        calls: number of calls per rank, without calls that tuned.
        tuned_calls: number of calls per rank that tuned. All other attributes exclude these calls.
        ms: time of a call on its slowest rank in ms, median over calls.
        ms_by_rank: time of a call in ms on each rank, median over calls.
        skew_us: difference between the latest and the earliest start of a call among all ranks, in
            µs. Median over calls.
        flops, bytes, link_bytes: work of one rank in a call: FLOPs, bytes of memory traffic, and
            bytes over links to other ranks.
        bounds_ms: time in ms that each resource would take at its peak rate.
        tflops, gbps, link_gbps: rates of one rank. They are ``None`` if ``testing/opinfo`` has no
            FLOPs and bytes for the op.
        bound: the resource with the largest time in ``bounds_ms``.
        limit_ms: the largest time in ``bounds_ms``, which is a lower bound of ``ms``.
        marks: share of each phase that ``dl.mark`` names in the time of kernel programs, mean over
            ranks and calls. ``None``: the timeline was recorded without marks.
        share: ``limit_ms / ms``.
    """

    op: str
    shape: str
    dtype: str
    num_ranks: int
    calls: int
    tuned_calls: int
    ms: float | None
    ms_by_rank: dict[int, float]
    skew_us: float
    flops: float | None = None
    bytes: float | None = None
    link_bytes: float | None = None
    bounds_ms: dict[str, float] | None = None
    limit_ms: float | None = None
    marks: dict[str, float] | None = None
    run: int = 0

    @property
    def bound(self) -> str | None:
        bounds = self.bounds_ms
        return max(bounds, key=lambda name: bounds[name]) if bounds else None

    @property
    def share(self) -> float | None:
        return None if self.limit_ms is None or not self.ms else self.limit_ms / self.ms

    @property
    def tflops(self) -> float | None:
        return self._rate(self.flops, 1e9)

    @property
    def gbps(self) -> float | None:
        return self._rate(self.bytes, 1e6)

    @property
    def link_gbps(self) -> float | None:
        return self._rate(self.link_bytes, 1e6)

    def tree(self) -> dict[str, Any]:
        """Return all attributes as a JSON tree with stable names."""
        derived = ("tflops", "gbps", "link_gbps", "bound", "share")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def _rate(self, amount: float | None, unit: float) -> float | None:
        return None if amount is None or not self.ms else amount / self.ms / unit


_WORK_FIELDS = ("flops", "bytes", "link_bytes", "bounds_ms", "limit_ms")


def summaries(calls: Iterable[Mapping[str, Any]]) -> list[OpSummary]:
    """Return a summary of each op and shape, sorted by total time, longest first. The n-th call of
    an op and shape on a rank is matched with the n-th call on the other ranks."""
    groups: dict[tuple[Any, ...], dict[int, list[Mapping[str, Any]]]] = {}
    for call in sorted(calls, key=lambda call: int(call["call"])):
        names = ("op", "shape", "dtype", "num_ranks", "run")
        op_and_shape = tuple(call.get(name) for name in names)
        groups.setdefault(op_and_shape, {}).setdefault(int(call["rank"]), []).append(call)
    found = [_summary(by_rank) for by_rank in groups.values()]
    return sorted(found, key=lambda each: -(each.ms or 0.0) * each.calls)


def _summary(by_rank: Mapping[int, list[Mapping[str, Any]]]) -> OpSummary:
    timed = {rank: [call for call in calls if not call["tuned"]] for rank, calls in by_rank.items()}
    matched = list(zip(*timed.values(), strict=False))
    example = next(iter(by_rank.values()))[0]
    tuned = max(sum(bool(call["tuned"]) for call in calls) for calls in by_rank.values())
    begins = [[call["begin_us"] for call in calls] for calls in matched]
    return OpSummary(
        op=example["op"],
        shape=example.get("shape", ""),
        dtype=example.get("dtype", ""),
        num_ranks=example.get("num_ranks", 1),
        run=example.get("run", 0),
        calls=len(matched),
        tuned_calls=tuned,
        ms=_median([max(call["ms"] for call in calls) for calls in matched]),
        ms_by_rank={
            rank: statistics.median(call["ms"] for call in calls)
            for rank, calls in sorted(timed.items())
            if calls
        },
        marks=_mean_shares(
            [call["marks"] for calls in matched for call in calls if "marks" in call]
        ),
        skew_us=_median([max(each) - min(each) for each in begins]) or 0.0,
        **{name: example[name] for name in _WORK_FIELDS if name in example},
    )


def _mean_shares(shares: list[dict[str, float]]) -> dict[str, float] | None:
    names = dict.fromkeys(name for each in shares for name in each)
    found = {name: sum(each.get(name, 0.0) for each in shares) / len(shares) for name in names}
    return found if shares else None


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
