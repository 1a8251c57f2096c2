"""Define the outcome of trying one config (a measurement or a failure), and its JSON form."""

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
    """Latencies in milliseconds, in the order of measurement."""
    warmup: int
    """Number of untimed runs before each series of samples."""
    reduction: Reduction = "none"
    """``maximum``: each sample is the maximum over the ranks' times. ``none``: a single rank."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a measurement needs at least one sample")
        if not all(math.isfinite(sample) for sample in self.samples):
            raise ValueError(f"samples must be finite times, got {self.samples}")

    @property
    def median(self) -> float:
        """Median of the samples in milliseconds."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Failure:
    """Reason why a config was dropped."""

    kind: FailureKind
    message: str
    rank: int | None = None
    """Lowest rank on which the config failed; ``None`` if no rank tried the config."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.kind}{where}: {self.message}"


Outcome = Measurement | Failure

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that the functions of this module may raise for a malformed JSON tree."""


def merge_outcomes(earlier: Outcome | None, later: Outcome) -> Outcome:
    """Return one outcome of a config from two: all samples, or the failure if one failed."""
    if earlier is None or isinstance(later, Failure):
        return later
    if isinstance(earlier, Failure):
        return earlier
    return Measurement(earlier.samples + later.samples, earlier.warmup, earlier.reduction)


def outcome_tree(outcome: Outcome) -> dict[str, Any]:
    """Return ``outcome`` as a JSON tree. The entry ``ms``, the median, is for human readers."""
    if isinstance(outcome, Failure):
        return {"failure": dict(vars(outcome))}
    return {"ms": outcome.median, **vars(outcome), "samples": list(outcome.samples)}


def read_number(value: Any) -> float:
    """Return ``value`` as a float. Raise ``ValueError`` or ``TypeError`` if it is not finite."""
    if isinstance(value, str) or not math.isfinite(number := float(value)):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def read_outcome(tree: Mapping[str, Any]) -> Outcome:
    """Return the outcome in a tree of :func:`outcome_tree`. Raise one of :data:`UNREADABLE`."""
    if "failure" in tree:
        failure = Failure(**tree["failure"])
        if failure.kind not in FAILURE_KINDS:
            raise ValueError(f"a failure has the unknown kind {failure.kind!r}")
        if not isinstance(failure.message, str) or type(failure.rank) not in (int, type(None)):
            raise ValueError(f"a failure has message {failure.message!r}, rank {failure.rank!r}")
        return failure
    if tree["reduction"] not in _REDUCTIONS:
        raise ValueError(f"a measurement has the unknown reduction {tree['reduction']!r}")
    samples = tuple(map(read_number, tree["samples"]))
    return Measurement(samples, int(tree["warmup"]), tree["reduction"])


class RankTimes(NamedTuple):
    """Summary of the samples of one config on each rank. Index n belongs to rank n."""

    medians_ms: tuple[float, ...]
    """Median of the rank's samples, in milliseconds."""
    num_slowest: tuple[int, ...]
    """Number of samples in which the rank was the slowest. A tie counts for the lowest rank."""

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> RankTimes:
        """Summarise ``samples``: one sequence of milliseconds per rank, in order of time."""
        slowest = [times.index(max(times)) for times in zip(*samples, strict=True)]
        medians = (round(statistics.median(each), 6) for each in samples)
        return cls(tuple(medians), tuple(map(slowest.count, range(len(samples)))))

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> RankTimes:
        return cls(tuple(map(float, tree["ms"])), tuple(map(int, tree["slowest"])))

    def to_tree(self) -> dict[str, Any]:
        return {"ms": list(self.medians_ms), "slowest": list(self.num_slowest)}

    def __str__(self) -> str:
        """Return a sentence with the slowest rank and the range of the medians."""
        ms, counts, ranks = self.medians_ms, self.num_slowest, range(len(self.medians_ms))
        slowest = max(ranks, key=counts.__getitem__)
        low, high = min(ranks, key=ms.__getitem__), max(ranks, key=ms.__getitem__)
        return (
            f"rank {slowest} was the slowest in {counts[slowest]} of {sum(counts)} samples; "
            f"medians from {ms[low]:.4f} ms (rank {low}) to {ms[high]:.4f} ms (rank {high})"
        )


@dataclass(frozen=True)
class Request:
    """Request of a search to take ``num_samples`` samples of ``config`` next.

    If a search requests a config repeatedly, its samples are merged. A config is compiled, run
    once, and its result checked at the first request only.
    """

    config: Config
    num_samples: int

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"a request needs at least 1 sample, got {self.num_samples}")


@dataclass(frozen=True)
class LaunchStep:
    """One kernel launch with ``config`` during ``contextual_autotune``."""

    config: Config
    is_timed: bool


@dataclass(frozen=True)
class JournalEntry:
    """One request of a tuning and its outcome, as written to the journal on disk."""

    index: int
    """Index of the request, from 0."""
    config_digest: str
    num_samples: int
    outcome: Outcome
    seconds: float
    """Seconds of tuning until the outcome, without interruptions."""

    def to_tree(self) -> dict[str, Any]:
        request = {"n": self.index, "config": self.config_digest, "asked": self.num_samples}
        return {**request, "seconds": round(self.seconds, 3), **outcome_tree(self.outcome)}

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> JournalEntry:
        """Return the entry in a tree of :meth:`to_tree`. Raise one of :data:`UNREADABLE`."""
        return cls(
            int(tree["n"]),
            str(tree["config"]),
            int(tree["asked"]),
            read_outcome(tree),
            read_number(tree["seconds"]),
        )
