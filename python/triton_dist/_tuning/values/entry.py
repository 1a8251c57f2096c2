"""One line of a tuning's journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from triton_dist._tuning.values.outcome import Outcome, outcome_tree, read_number, read_outcome


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
