"""The way in which candidates are measured, and how many: part of what a result depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triton_dist._tuning.values.product import Candidates, Unlisted

EFFORTS = {"quick": 50, "normal": 200, "max": 1000}
"""Candidates that a search tries which cannot try all, by the name of an effort."""
LISTING = ("racing", "exhaustive")
"""Searches that try every candidate."""
_RACED = 1.5
"""``search="auto"``: times ``tries``, so many candidates are raced; of more a model says which."""


@dataclass(frozen=True)
class Policy:
    """The numbers of a tuning.

    A result found under another policy is another result: a winner of eager launches is not the
    winner in a graph, and the best of three candidates not the best of all.
    """

    warmup: int = 3
    """Untimed runs before the samples of each request, besides the one run to the end that every
    candidate begins with."""
    repeat: int = 10
    """Timed runs of each candidate; when they race, of each finalist in the final, at most."""
    doubt: int = 0
    """In a race, so many more runs of finalists that noise does not tell apart. No fact of a
    result, which it makes surer but not another."""
    rounds: tuple[int, ...] = (1, 2, 5)
    """In a race, samples that a candidate has after each round before the final."""
    timing: str = "events"
    """``events``: the device's own timer around each run. ``graph``: the same around replays of
    each candidate, captured."""
    flush: bool = True
    """True if the last-level cache is evicted before each run."""
    search: str = "exhaustive"
    indifference: float = 0.01
    """Relative difference in time that nobody minds: within it the earliest config is preferred."""
    max_seconds: float | None = None
    """No new candidate is begun after that; the first always is."""
    max_trials: int | None = None
    """At most so many candidates are tried, however often each."""
    tries: int | None = None
    """Candidates that are tried where a model says which; ``max_trials`` are the most."""

    @property
    def untimed(self) -> int:
        """Runs of a config before those that a request asks for; a graph is captured in one."""
        return self.warmup + (self.timing == "graph")

    def models(self, candidates: Candidates) -> bool:
        """True if a model of what was measured says what to try: there are many candidates."""
        many = isinstance(candidates, Unlisted) or len(candidates) > _RACED * (self.tries or 0)
        return self.search == "surrogate" or (self.search == "auto" and many)

    def most_tried(self, number: int) -> int:
        """Candidates of so many that are tried, at most, where not all are."""
        return min(number, self.tries or number, self.max_trials or number)

    @classmethod
    def on(
        cls,
        device: str,
        *,
        timing: str,
        search: str,
        alternates: bool = False,
        max_seconds: float | None = None,
        max_trials: int | None = None,
        effort: str = "normal",
    ) -> Policy:
        """The numbers for a device: the one place that says how often a candidate runs.

        A racing candidate has no warm-up but its run to the end, which comes right before its first
        sample: compiled and loaded it is by then, and caches are evicted before each sample anyway.
        A captured graph is replayed once untimed, since its first launch uploads it.

        On CPU ranks a run takes 10 to 100 ms in the interpreter and no user minds which config
        wins: few runs. Nor does one sample show a clear loser there: processes share the cores. Nor
        on a GPU that ranks share (``alternates``), where a run takes as long and its time says how
        often it waited for a turn; nor is a graph of use then, or on a CPU.
        """
        in_turn, cpu = search == "exhaustive", device == "cpu"
        timing = "events" if cpu or alternates else timing
        warmup = (1 if cpu or alternates else 3) if in_turn else 0
        lists = search in LISTING
        if effort == "quick" and lists and max_trials is None:
            max_trials = EFFORTS[effort]
        return cls(
            warmup=max(warmup, 1) if timing == "graph" else warmup,
            repeat=4 if cpu or alternates else 10,
            doubt=0 if cpu or alternates else 60,
            rounds=(2,) if cpu or alternates else (1, 2, 5),
            timing=timing,
            search=search,
            max_seconds=max_seconds,
            max_trials=max_trials,
            tries=None if lists else max_trials or EFFORTS[effort],
        )

    def facts(self) -> Mapping[str, str]:
        """All fields that are set and matter, as text; part of the fingerprint."""
        facts = {name: value for name, value in vars(self).items() if name != "doubt"}
        return {name: str(value) for name, value in facts.items() if value is not None}
