"""Parameters of a tuning: how candidates are measured, and how many of them are tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from triton_dist._tuning.values.product import Candidates, UnlistedCandidates

T = TypeVar("T")

TRIES_BY_EFFORT = {"quick": 50, "normal": 200, "max": 1000}
"""Number of candidates that a model of the measured times selects to try, by the ``effort`` of the
decorator. With ``quick``, the number also limits the searches without a model."""
FULL_SEARCHES = ("racing", "exhaustive", "prior")
"""Searches without a model of the measured times. They try all candidates, or the ``max_trials``
most promising."""
PRIOR_TRIALS = 8
"""Default of ``max_trials`` for ``search="prior"``."""
MODEL_SEARCHES = ("surrogate", "optuna")
"""Searches that try the ``tries`` candidates that a model selects."""
_MAX_RACED_PER_TRY = 1.5
"""``search="auto"`` races all candidates if their number is at most this multiple of ``tries``. If
there are more, a model selects ``tries`` of them."""


@dataclass(frozen=True)
class Policy:
    """The parameters of a tuning.

    The policy is part of a record's fingerprint, because the winner depends on it. The winner of
    eager launches may lose in a CUDA graph, and the best of three candidates may not be the best
    of all. A *sample* is the time of one run.
    """

    warmup: int = 3
    """Untimed runs before each series of consecutive samples of a candidate. The first run of a
    candidate, which the host waits for, is additional."""
    repeat: int = 10
    """Samples of each candidate. In a race: maximum samples of a finalist in the final."""
    max_extra_samples: int = 0
    """In a race: samples beyond ``repeat`` of finalists whose difference is within noise. Not part
    of the fingerprint: it changes the certainty of a result, not its meaning."""
    rounds: tuple[int, ...] = (1, 2, 5)
    """In a race: samples that a candidate has in total after stages 1, 2 and 3. The final is the
    stage after them."""
    timing: str = "events"
    """``events``: device timer around each run. ``graph``: device timer around replays of a CUDA
    graph of each candidate."""
    flush: bool = True
    """Evict the last-level cache before each run."""
    search: str = "exhaustive"
    indifference: float = 0.01
    """Relative difference of two times that is negligible. If noise hides which of two configs is
    faster, and their times differ by less, the config that is earlier in the space wins."""
    max_seconds: float | None = None
    """Seconds of tuning after which no new candidate starts. The first candidate always starts."""
    max_trials: int | None = None
    """Maximum number of candidates tried. Each of them may be sampled several times."""
    tries: int | None = None
    """Number of candidates that a model selects to try; at most ``max_trials``."""

    @property
    def untimed_runs(self) -> int:
        """Untimed runs of a config before each series of samples; a graph capture counts as one."""
        return self.warmup + (self.timing == "graph")

    def is_model_based(self, candidates: Candidates) -> bool:
        """Return whether a model of the measured times selects the candidates to try."""
        if self.search != "auto":
            return self.search in MODEL_SEARCHES
        max_raced = _MAX_RACED_PER_TRY * (self.tries or 0)
        return isinstance(candidates, UnlistedCandidates) or len(candidates) > max_raced

    def max_tried(self, number: int) -> int:
        """Return the maximum number of candidates tried out of ``number``.

        With ``search="auto"``, a race may try up to 1.5 times ``tries``.
        """
        return min(number, self.tries or number, self.max_trials or number)

    def most_promising(self, predicted_ms: Mapping[T, float]) -> T:
        """Return the first key whose prediction is within ``indifference`` of the smallest.

        A prediction is less precise than a measurement, and spaces list preferred configs first.
        """
        limit = (1 + self.indifference) * min(predicted_ms.values())
        return next(each for each, milliseconds in predicted_ms.items() if milliseconds <= limit)

    @classmethod
    def for_device(
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
        """Return the policy for a device. This function alone sets the numbers of runs.

        A candidate of a race needs no warm-up. Its first run, directly before the first sample,
        compiles and loads it, and caches are evicted before each sample. A captured graph is
        replayed once untimed, because its first launch uploads it.

        CPU ranks take few samples: a run takes 10 to 100 ms in the interpreter, and the winner does
        not matter. One sample does not identify a slow candidate, because processes share the
        cores. If several ranks share a GPU (``gpu_is_shared``), the numbers are as low. Such a time
        mainly shows how long the rank waited for the lock that lets one rank run at a time. Neither
        case uses graphs.
        """
        few_runs = device == "cpu" or gpu_is_shared
        timing = "events" if few_runs else timing
        warmup = (1 if few_runs else 3) if search == "exhaustive" else 0
        is_full = search in FULL_SEARCHES
        if search == "prior" and max_trials is None:
            max_trials = PRIOR_TRIALS
        if effort == "quick" and is_full and max_trials is None:
            max_trials = TRIES_BY_EFFORT[effort]
        return cls(
            warmup=max(warmup, 1) if timing == "graph" else warmup,
            repeat=4 if few_runs else 10,
            max_extra_samples=0 if few_runs else 60,
            rounds=(2,) if few_runs else (1, 2, 5),
            timing=timing,
            search=search,
            max_seconds=max_seconds,
            max_trials=max_trials,
            tries=None if is_full else max_trials or TRIES_BY_EFFORT[effort],
        )

    def fingerprint_fields(self) -> Mapping[str, str]:
        """Return the fields that are part of the fingerprint, as text."""
        fields = {name: value for name, value in vars(self).items() if name != "max_extra_samples"}
        return {name: str(value) for name, value in fields.items() if value is not None}
