"""What came of trying one config: a measurement or a failure, never ``inf`` and never ``None``."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal, get_args

FailureKind = Literal[
    "pruned", "compile", "resources", "launch", "wrong_result", "timeout", "crashed"
]
FAILURE_KINDS: tuple[str, ...] = get_args(FailureKind)


@dataclass(frozen=True)
class Measurement:
    """Samples of one config."""

    samples: tuple[float, ...]
    """Milliseconds, in the order in which they were taken."""
    warmup: int
    """Untimed runs before them."""
    reduction: Literal["none", "maximum"] = "none"
    """``maximum``: each sample is that of the rank that was slowest in it."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ValueError("a measurement needs at least one sample")

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.samples)


@dataclass(frozen=True)
class Failure:
    """Why a config cannot be used."""

    kind: FailureKind
    message: str
    rank: int | None = None
    """The lowest rank on which it failed; ``None`` if no rank tried it."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.kind}{where}: {self.message}"


Outcome = Measurement | Failure
