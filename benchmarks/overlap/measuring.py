"""Check the output of each candidate (a baseline, or the op with one config), then time all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from triton_dist.runtime.device import current_device
from triton_dist.runtime.ranks import group_for
from triton_dist.runtime.waits import bounded_waits
from triton_dist.testing import poisoned_empty
from triton_dist.testing.assertions import count_mismatches
from triton_dist.testing.opinfo.base import Baseline
from triton_dist.testing.timing import Samples, time_interleaved

from .workload import Workload

T = TypeVar("T")
MODES = ("eager", "graph")
_STEP_SECONDS = 30.0
"""Time limit of each step of a check: the capture, the run and the comparison."""


@dataclass(frozen=True)
class Row:
    """Times per call of one candidate in one mode."""

    name: str
    mode: str
    candidate: Baseline
    samples: Samples


class FailedOnSomeRank(Exception):
    """A candidate failed on some rank. Raised on all ranks."""


def measure(
    workload: Workload, modes: Sequence[str], rounds: int, warmup_rounds: int, num_calls: int = 1
) -> tuple[list[Row], dict[str, str]]:
    """Return a row for each candidate and mode, and the errors of those that failed.

    A sample is the time of ``num_calls`` consecutive calls divided by ``num_calls``. In graph mode,
    one graph has all these calls.
    """
    checked: dict[str, tuple[str, str, Baseline]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for name, candidate in workload.candidates().items():
        for mode in modes:
            label = f"{name}, {mode}"
            workload.refresh()
            try:
                graph = mode == "graph"
                calls[label] = _checked_call(candidate, label, graph, workload.tolerance, num_calls)
                checked[label] = name, mode, candidate
            except FailedOnSomeRank as failure:
                failures[label] = str(failure)
                workload.recover()
    samples = time_interleaved(calls, rounds, warmup_rounds)
    return [Row(*checked[label], samples[label].divided_by(num_calls)) for label in calls], failures


def _checked_call(
    candidate: Baseline, label: str, graph: bool, tolerance: float, num_calls: int
) -> Callable[[], Any]:
    """Run ``num_calls`` calls, check the last output, and return the function to time."""
    latest: dict[str, torch.Tensor] = {}

    def call_and_keep_output() -> None:
        for _ in range(num_calls):
            latest.update(output=candidate.call())

    call: Callable[[], Any] = call_and_keep_output
    if graph:
        call = _on_all_ranks(
            f"{label}: capture",
            lambda: current_device().capture(call_and_keep_output, _STEP_SECONDS),
        )

    def run() -> None:
        if graph and candidate.expected is not None:
            for output in latest.values():  # empty on CPU ranks, where a capture runs nothing
                output.fill_(float("nan"))
        with poisoned_empty():
            call()

    def check() -> None:
        if candidate.expected is not None:
            _compare(latest["output"], candidate.expected(), tolerance)

    _on_all_ranks(f"{label}: run", run)
    _on_all_ranks(f"{label}: check", check)
    return call


def _on_all_ranks(phase: str, step: Callable[[], T]) -> T:
    """Return the result of ``step``. Raise ``FailedOnSomeRank`` on all ranks if it raised on some.

    Otherwise a rank could wait in a collective for a rank that failed before it.
    """
    failure = ""
    try:
        with bounded_waits(_STEP_SECONDS):
            value = step()
            current_device().synchronize(_STEP_SECONDS)
    except Exception as error:  # whatever the error, measure the other candidates
        failure = f"{type(error).__name__}: {error}"
    for rank, reason in enumerate(group_for().all_gather(phase, failure)):
        if reason:
            raise FailedOnSomeRank(f"rank {rank}: {reason}")
    return value


def _compare(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if output.shape != expected.shape:
        raise AssertionError(f"shape {tuple(output.shape)}, expected {tuple(expected.shape)}")
    wrong = int(count_mismatches(output, expected, rtol=tolerance, atol=tolerance))
    if wrong:
        raise AssertionError(f"{wrong} of {output.numel()} values are wrong")
