"""The table at the end of a tuning."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from triton_dist._tuning.values import Failure, Measurement, Trial, TuningRecord
from triton_dist._warn import printable, warn
from triton_dist.errors import TuningWarning

_TOP = 5
_PRUNED = 20
"""Pruned configs that are named."""
_LEGEND = (
    "  to best, to default: its time over that of the fastest config, and over that of the first "
    "one of the space; spread: distance of its quartiles over its median"
)


def summary(record: TuningRecord, default: str, phases: Mapping[str, float]) -> list[str]:
    """Lines: the fastest configs, the winner and the default, then failures by kind.

    Args:
        default: digest of the first config of the space.
        phases: seconds by name, which add up to those of the record.
    """
    measured = sorted(
        ((t, t.outcome) for t in record.trials if isinstance(t.outcome, Measurement)),
        key=lambda pair: pair[1].median,
    )
    medians = {trial.digest: outcome.median for trial, outcome in measured}
    fastest, best = measured[0][1].median, record.best.digest
    lines = [f"  {'ms':>10} {'spread':>7} {'to best':>8} {'to default':>10} {'samples':>7}  config"]
    for place, (trial, outcome) in enumerate(measured):
        marks = [name for name, d in (("winner", best), ("default", default)) if d == trial.digest]
        if place >= _TOP and not marks:
            continue
        to_default = _ratio(outcome.median, medians.get(default))
        note = f"  <- {', '.join(marks)}" if marks else ""
        lines.append(
            f"  {outcome.median:10.4f} {_spread(outcome):>7} {_ratio(outcome.median, fastest):>8} "
            f"{to_default:>10} {len(outcome.samples):>7}  {trial}{note}"
        )
    if len(measured) > len(lines) - 1:
        lines.append(f"  and {len(measured) - len(lines) + 1} more")
    ranks = record.by_rank.get(best)
    lines += [] if ranks is None else [f"  the winner by rank: {ranks}"]
    lines += [_LEGEND, *_failures(record.trials)]
    lines += [f"  {number} x pruned: {reason}" for reason, number in record.dropped.items()]
    spent = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    return [*lines, f"  of {record.seconds:.1f} s: {spent}"]


def warn_of_failures(title: str, record: TuningRecord, remedy: str) -> None:
    """Warn if more than half of the configs that were tried failed: the winner is the best of few.

    Args:
        remedy: where each failure is said.
    """
    outcomes = [(trial, trial.outcome) for trial in record.trials]
    failures = [(trial, each) for trial, each in outcomes if isinstance(each, Failure)]
    failures = [(trial, each) for trial, each in failures if each.kind != "pruned"]
    tried = len(failures) + sum(isinstance(each, Measurement) for _, each in outcomes)
    if 2 * len(failures) > tried:
        trial, failure = failures[0]
        warn(
            f"{title}: {len(failures)} of {tried} configs failed, the first, {trial}: "
            f"{one_line(str(failure))}. The best of the others is used; {remedy}",
            TuningWarning,
        )


def _spread(outcome: Measurement) -> str:
    """Distance of the quartiles, relative to the median."""
    if len(outcome.samples) < 2:
        return "-"
    first, _, third = statistics.quantiles(outcome.samples, n=4, method="inclusive")
    return f"{(third - first) / outcome.median:.1%}" if outcome.median else "-"


def _ratio(time: float, other: float | None) -> str:
    return f"{time / other:.3f}x" if other else "-"


def _failures(trials: tuple[Trial, ...]) -> Iterator[str]:
    """Yield a line for each pruned config, then one a kind of failure with its first message."""
    kinds: dict[str, list[Failure]] = {}
    pruned: list[str] = []
    for trial in trials:
        if isinstance(trial.outcome, Failure) and trial.outcome.kind == "pruned":
            pruned.append(f"  pruned: {trial}, {one_line(trial.outcome.message)}")
        elif isinstance(trial.outcome, Failure):
            kinds.setdefault(trial.outcome.kind, []).append(trial.outcome)
    yield from pruned[:_PRUNED]
    if len(pruned) > _PRUNED:
        yield f"  and {len(pruned) - _PRUNED} more were pruned"
    for kind, failures in kinds.items():
        yield f"  {len(failures)} x {kind}, the first: {one_line(failures[0].message)}"


def one_line(text: str) -> str:
    """The beginning of a message."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= 160 else f"{text[:160]} ..."
