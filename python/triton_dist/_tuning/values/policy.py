"""How candidates are measured and how many: part of what a result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """The numbers of a tuning.

    A result found under another policy is another result: a winner of eager launches is not the
    winner in a graph, and the best of three candidates not the best of all.
    """

    warmup: int = 3
    """Untimed runs of each candidate."""
    repeat: int = 10
    """Timed runs of each candidate."""
    timing: str = "events"
    """``events``: the device's own timer around each run."""
    flush: bool = True
    """Whether the last-level cache is evicted before each run."""
    search: str = "exhaustive"
    max_seconds: float | None = None
    """No new candidate is begun after that; the first always is."""
    max_trials: int | None = None
    """At most so many candidates are tried."""

    def facts(self) -> Mapping[str, str]:
        """All fields that are set, as text; part of the fingerprint."""
        return {name: str(value) for name, value in vars(self).items() if value is not None}
