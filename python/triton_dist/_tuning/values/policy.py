"""Define how candidates are measured and how many are tried. A result depends on this policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triton_dist._tuning.values.product import Candidates, Unlisted

TRIES_BY_EFFORT = {"quick": 50, "normal": 200, "max": 1000}
"""Number of candidates that a model selects to try, by effort. ``quick`` limits every search."""
FULL_SEARCHES = ("racing", "exhaustive")
"""Searches that try every candidate, up to ``max_trials``."""
MODEL_SEARCHES = ("surrogate", "optuna")
"""Searches that try the candidates that a model selects."""
_MAX_RACED_PER_TRY = 1.5
"""``search="auto"`` races all candidates if there are at most ``tries`` times this factor. If there
are more, a model selects ``tries`` of them."""


@dataclass(frozen=True)
class Policy:
    """The parameters of a tuning.

    A result is valid only for its policy: the winner of eager launches may lose in a CUDA graph,
    and the best of three candidates may not be the best of all.
    """

    warmup: int = 3
    """Untimed runs before each series of samples that the search requests. The first, synchronised
    run of a candidate is not included."""
    repeat: int = 10
    """Timed runs of each candidate; in a race, maximum timed runs of each finalist."""
    tie_break: int = 0
    """Additional timed runs, in a race, of finalists whose difference is within noise. Not part of
    the fingerprint: it changes the certainty of a result, not its meaning."""
    rounds: tuple[int, ...] = (1, 2, 5)
    """Total samples of a candidate, in a race, at the end of each round before the final."""
    timing: str = "events"
    """``events``: device timer around each run. ``graph``: device timer around replays of a CUDA
    graph of each candidate."""
    flush: bool = True
    """Evict the last-level cache before each run."""
    search: str = "exhaustive"
    indifference: float = 0.01
    """Largest relative difference in time at which the config that is earlier in the space wins if
    noise hides which config is faster."""
    max_seconds: float | None = None
    """Time after which no new candidate starts; the first candidate always starts."""
    max_trials: int | None = None
    """Maximum number of candidates tried. The search may request samples of one several times."""
    tries: int | None = None
    """Number of candidates that a model selects to try; at most ``max_trials``."""

    @property
    def untimed_runs(self) -> int:
        """Untimed runs of a config before each series of samples, including a graph capture."""
        return self.warmup + (self.timing == "graph")

    def is_model_based(self, candidates: Candidates) -> bool:
        """Return whether a model of the measurements selects the candidates to try."""
        many = isinstance(candidates, Unlisted) or len(candidates) > _MAX_RACED_PER_TRY * (
            self.tries or 0
        )
        return self.search in MODEL_SEARCHES or (self.search == "auto" and many)

    def max_tried(self, number: int) -> int:
        """Return the maximum number of candidates tried out of ``number``.

        A race that ``search="auto"`` selected may try more: up to 1.5 times ``tries``.
        """
        return min(number, self.tries or number, self.max_trials or number)

    @classmethod
    def on(
        cls,
        device: str,
        *,
        timing: str,
        search: str,
        gpu_is_shared: bool = False,
        max_seconds: float | None = None,
        max_trials: int | None = None,
        effort: str = "normal",
    ) -> Policy:
        """Return the policy for a device. All numbers of runs are decided here.

        A racing candidate needs no warm-up: its first run, directly before the first sample, has
        compiled and loaded it, and caches are evicted before each sample. A captured graph is
        replayed once untimed, because its first launch uploads it.

        CPU ranks use few runs: a run takes 10 to 100 ms in the interpreter, and the winner does not
        matter. One sample does not identify a slow candidate, because processes share the cores.
        With ``gpu_is_shared`` the numbers are equally low: a time on a GPU that several ranks share
        mainly shows how often the rank waited for the tuning lock. Neither case uses graphs.
        """
        in_turn, cpu = search == "exhaustive", device == "cpu"
        timing = "events" if cpu or gpu_is_shared else timing
        warmup = (1 if cpu or gpu_is_shared else 3) if in_turn else 0
        lists = search in FULL_SEARCHES
        if effort == "quick" and lists and max_trials is None:
            max_trials = TRIES_BY_EFFORT[effort]
        return cls(
            warmup=max(warmup, 1) if timing == "graph" else warmup,
            repeat=4 if cpu or gpu_is_shared else 10,
            tie_break=0 if cpu or gpu_is_shared else 60,
            rounds=(2,) if cpu or gpu_is_shared else (1, 2, 5),
            timing=timing,
            search=search,
            max_seconds=max_seconds,
            max_trials=max_trials,
            tries=None if lists else max_trials or TRIES_BY_EFFORT[effort],
        )

    def facts(self) -> Mapping[str, str]:
        """Return the fields that are part of the fingerprint, as text."""
        facts = {name: value for name, value in vars(self).items() if name != "tie_break"}
        return {name: str(value) for name, value in facts.items() if value is not None}
