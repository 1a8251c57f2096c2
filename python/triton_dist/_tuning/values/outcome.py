"""Outcome of trying one config: a measurement or a failure, never ``inf`` and never ``None``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
