"""Check every candidate in every mode, then time all of them interleaved."""

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
from triton_dist.testing.timing import Samples, interleaved

from .workload import Workload

T = TypeVar("T")
MODES = ("eager", "graph")
_SECONDS = 30.0
"""Longest that one call of a candidate may take while it is checked."""


@dataclass(frozen=True)
class Row:
    """A candidate in a mode, and its samples, in time per call."""

    name: str
    mode: str
    candidate: Baseline
    samples: Samples


class Failed(Exception):
    """A candidate cannot be measured; every rank raises this."""


def measure(
    workload: Workload, modes: Sequence[str], rounds: int, warmup_rounds: int, num_calls: int = 1
) -> tuple[list[Row], dict[str, str]]:
    """Return rows in the order of the candidates, and the errors of failed candidates by name and
    mode.

    A sample covers ``num_calls`` consecutive calls, in graph mode in one graph, and is divided by
    their number. As in a model, many calls then share the launch of a graph and the skew between
    ranks.
    """
    ready: dict[str, tuple[str, str, Baseline]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    failures: dict[str, str] = {}
    for name, candidate in workload.candidates().items():
        for mode in modes:
            label = f"{name}, {mode}"
            workload.refresh()
            try:
                graph = mode == "graph"
                calls[label] = _checked(candidate, label, graph, workload.tolerance, num_calls)
                ready[label] = name, mode, candidate
            except Failed as failure:
                failures[label] = str(failure)
                workload.recover()
    samples = interleaved(calls, rounds, warmup_rounds)
    return [Row(*ready[label], samples[label].divided_by(num_calls)) for label in calls], failures


def _checked(
    candidate: Baseline, label: str, graph: bool, tolerance: float, num_calls: int
) -> Callable[[], Any]:
    """Return the function to time, after one run whose last output was right on every rank."""
    latest: dict[str, torch.Tensor] = {}

    def keep() -> None:
        for _ in range(num_calls):
            latest.update(output=candidate.call())

    call: Callable[[], Any] = keep
    if graph:
        call = _together(f"{label}: capture", lambda: current_device().capture(keep, _SECONDS))

    def run() -> None:
        if graph and candidate.expected is not None:
            for output in latest.values():  # CPU ranks have no warm-up
                output.fill_(float("nan"))
        with poisoned_empty():
            call()

    def check() -> None:
        if candidate.expected is not None:
            _compare(latest["output"], candidate.expected(), tolerance)

    _together(f"{label}: run", run)
    _together(f"{label}: check", check)
    return call


def _together(phase: str, step: Callable[[], T]) -> T:
    """Return the result of ``step``; if it raised on some rank, raise ``Failed`` on all ranks.

    So no rank continues to a collective that another rank does not reach.
    """
    failure = ""
    try:
        with bounded_waits(_SECONDS):
            value = step()
            current_device().synchronize(_SECONDS)
    except Exception as error:  # any error of a candidate: measure the others
        failure = f"{type(error).__name__}: {error}"
    for rank, reason in enumerate(group_for().all_gather(phase, failure)):
        if reason:
            raise Failed(f"rank {rank}: {reason}")
    return value


def _compare(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    if output.shape != expected.shape:
        raise AssertionError(f"shape {tuple(output.shape)}, expected {tuple(expected.shape)}")
    wrong = int(count_mismatches(output, expected, rtol=tolerance, atol=tolerance))
    if wrong:
        raise AssertionError(f"{wrong} of {output.numel()} values are wrong")
