"""Outcome of trying one config: a measurement or a failure, never ``inf`` and never ``None``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from triton_dist._tuning.values.config import Config

Reduction = Literal["none", "maximum"]

FailureKind = Literal[
    "pruned", "compile", "resources", "launch", "wrong_result", "timeout", "crashed"
]
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)
_REDUCTIONS = get_args(Reduction)


@dataclass(frozen=True)
class Measurement:
    """Samples of one config."""

    samples: tuple[float, ...]
    """Milliseconds, in the order in which they were taken."""
    warmup: int
    """Untimed runs before them."""
    reduction: Reduction = "none"
    """``maximum``: each sample is that of the rank that was slowest in it."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a measurement needs at least one sample")
        if not all(math.isfinite(sample) for sample in self.samples):
            raise ValueError(f"a measurement's samples are times, got {self.samples}")

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Failure:
    """Reason for which a config cannot be used."""

    kind: FailureKind
    message: str
    rank: int | None = None
    """The lowest rank on which it failed; ``None`` if no rank tried it."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.kind}{where}: {self.message}"


Outcome = Measurement | Failure

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions of reading a tree that is not as it was written."""


def joined(earlier: Outcome | None, later: Outcome) -> Outcome:
    """Outcome of a config that was measured again: all samples, or a failure at any time."""
    if earlier is None or isinstance(later, Failure):
        return later
    if isinstance(earlier, Failure):
        return earlier
    return Measurement(earlier.samples + later.samples, earlier.warmup, earlier.reduction)


def outcome_tree(outcome: Outcome) -> dict[str, Any]:
    """For JSON; the median is for the eye."""
    if isinstance(outcome, Failure):
        return {"failure": dict(vars(outcome))}
    return {"ms": outcome.median, **vars(outcome), "samples": list(outcome.samples)}


def read_number(value: Any) -> float:
    """A number of a tree. Raises ``ValueError``, or ``TypeError``, for all else."""
    if isinstance(value, str) or not math.isfinite(number := float(value)):
        raise ValueError(f"{value!r} is no number")
    return number


def read_outcome(tree: Mapping[str, Any]) -> Outcome:
    """Reads what :func:`outcome_tree` wrote. Raises one of :data:`UNREADABLE`."""
    if "failure" in tree:
        failure = Failure(**tree["failure"])
        if failure.kind not in FAILURE_KINDS:
            raise ValueError(f"no failure is of kind {failure.kind!r}")
        if not isinstance(failure.message, str) or type(failure.rank) not in (int, type(None)):
            raise ValueError(f"a failure has message {failure.message!r}, rank {failure.rank!r}")
        return failure
    if tree["reduction"] not in _REDUCTIONS:
        raise ValueError(f"no measurement's reduction is {tree['reduction']!r}")
    samples = tuple(map(read_number, tree["samples"]))
    return Measurement(samples, int(tree["warmup"]), tree["reduction"])


class ByRank(NamedTuple):
    """Times of one config; a number for each rank, in the order of ranks."""

    ms: tuple[float, ...]
    """Median of the rank's own samples."""
    slowest: tuple[int, ...]
    """Number of samples in which the rank was the slowest; of equals the lowest rank."""

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> ByRank:
        """``samples`` in the order in which they were taken, by rank."""
        rounds = list(zip(*samples, strict=True))
        slowest = [round_.index(max(round_)) for round_ in rounds]
        medians = (round(statistics.median(own), 6) for own in samples)
        return cls(tuple(medians), tuple(map(slowest.count, range(len(samples)))))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> ByRank:
        return cls(tuple(map(float, tree["ms"])), tuple(map(int, tree["slowest"])))

    def to_tree(self) -> dict[str, Any]:
        return {"ms": list(self.ms), "slowest": list(self.slowest)}

    def __str__(self) -> str:
        """The slowest rank and the span of the medians, in words."""
        worst = max(range(len(self.slowest)), key=self.slowest.__getitem__)
        low, high = (pick(range(len(self.ms)), key=self.ms.__getitem__) for pick in (min, max))
        return (
            f"rank {worst} was the slowest in {self.slowest[worst]} of {sum(self.slowest)} "
            f"samples; medians from {self.ms[low]:.4f} ms (rank {low}) to {self.ms[high]:.4f} ms "
            f"(rank {high})"
        )


@dataclass(frozen=True)
class Request:
    """Measure ``config`` with so many timed samples, now.

    A config may be asked for again: its samples are put together, and all but measuring (prepare,
    first run, check) is done at the first request alone.
    """

    config: Config
    samples: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"a request for {self.samples} samples measures nothing")


@dataclass(frozen=True)
class Entry:
    """Outcome of the n-th request of a tuning."""

    n: int
    """From 0."""
    config: str
    """Its digest."""
    samples: int
    """Number of samples that were asked for."""
    outcome: Outcome
    seconds: float
    """Since the tuning began, without the time between an interruption and the next start."""

    def to_tree(self) -> dict[str, Any]:
        asked = {"n": self.n, "config": self.config, "asked": self.samples}
        return {**asked, "seconds": round(self.seconds, 3), **outcome_tree(self.outcome)}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Entry:
        """Reads what :meth:`to_tree` wrote. Raises one of :data:`outcome.UNREADABLE`."""
        return cls(
            int(tree["n"]),
            str(tree["config"]),
            int(tree["asked"]),
            read_outcome(tree),
            read_number(tree["seconds"]),
        )
