"""Delays of configs against the fastest beside them: of one tuning, and of several together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from triton_dist._tuning.values import Measurement, TuningRecord

_ROUNDS = 8
"""Steps in which several lists come to one scale."""


def slowdowns(record: TuningRecord) -> dict[str, float]:
    """By digest, the log of each config's median over the winner's."""
    medians = {
        trial.digest: trial.outcome.median
        for trial in record.trials
        if isinstance(trial.outcome, Measurement) and trial.outcome.median > 0
    }
    best = medians.get(record.best.digest) or min(medians.values(), default=1.0)
    return {digest: math.log(median / best) for digest, median in medians.items()}


def on_one_scale(
    delays: Sequence[Mapping[str, float]], weights: Sequence[float]
) -> dict[str, float]:
    """By name, the mean of several lists of delays, the zero of each of which is its own fastest.
    Least squares finds the offsets between lists: else what was measured beside slow ones alone
    would seem fast."""
    scores = means(delays, weights)
    for _ in range(_ROUNDS):
        zeros = (
            sum(scores[name] - delay for name, delay in there.items()) / max(1, len(there))
            for there in delays
        )
        moved = [
            {name: delay + zero for name, delay in there.items()}
            for there, zero in zip(delays, zeros, strict=True)
        ]
        scores = means(moved, weights)
    return scores


def means(lists: Iterable[Mapping[str, float]], weights: Iterable[float]) -> dict[str, float]:
    """By name, the weighted mean over those ``lists`` that have it."""
    sums: dict[str, tuple[float, float]] = {}
    for values, weight in zip(lists, weights, strict=True):
        for name, value in values.items():
            total, counts = sums.get(name, (0.0, 0.0))
            sums[name] = total + weight * value, counts + weight
    return {name: total / counts for name, (total, counts) in sums.items()}
