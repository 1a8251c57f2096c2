"""Whole tunings on recorded spaces: how near the best a search comes there."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from triton_dist._tuning import protocols
from triton_dist._tuning.values import Config, Failure, Outcome, Policy, winner
from triton_dist._tuning.values.outcome import joined
from triton_dist.testing.replay import RecordedSpace, Replay

Make = Callable[[Sequence[Config], Policy, int], protocols.Search]
"""A search of candidates, for a policy and a seed."""


@dataclass(frozen=True)
class Score:
    """One search on one space; regrets in percent."""

    space: str
    search: str
    mean: float
    error: float
    """Standard error of the mean."""
    p95: float
    tried: float
    """Configs that were tried, in the mean."""
    milliseconds: float
    """Processor time of the search, for each of them."""

    def __str__(self) -> str:
        return (
            f"{self.search:12s} regret {self.mean:6.2f} % ± {self.error:.2f}, p95 {self.p95:6.2f} "
            f"%, {self.tried:5.0f} tried, {self.milliseconds:6.2f} ms a try"
        )


def medians(space: RecordedSpace) -> dict[str, float]:
    """By digest; ``inf`` for what fails."""
    return {
        digest: math.inf if isinstance(runs, Failure) else statistics.median(runs)
        for digest, runs in space.runs.items()
    }


def regret(space: RecordedSpace, make: Make, policy: Policy, seed: int) -> tuple[float, int, float]:
    """One tuning as a GPU's would be, with recorded runs in an order by seed.

    Returns: by how much its winner is slower than the best, relatively and by the medians of all
    runs; the number of configs that were tried; the processor seconds that the search took.
    """
    draw = random.Random(seed)
    runs = {
        digest: own if isinstance(own, Failure) else tuple(draw.sample(own, len(own)))
        for digest, own in space.runs.items()
    }
    replay, outcomes, spent = Replay(runs), dict[str, Outcome](), 0.0
    # The default of a recorded space means nothing: any config may be first.
    candidates = draw.sample(space.configs, len(space.configs))
    taken = time.process_time()
    search = make(candidates, policy, seed)
    while (request := search.ask()) is not None:
        spent += time.process_time() - taken
        outcome = replay.attempt(request, policy)
        digest = request.config.digest
        outcomes[digest] = joined(outcomes.get(digest), outcome)
        taken = time.process_time()
        search.tell(request, outcome)
    true = medians(space)
    chosen = winner(list(outcomes.values()), policy.indifference)
    found = math.inf if chosen is None else true[list(outcomes)[chosen]]
    return found / min(true.values()) - 1, len(outcomes), spent


def score(
    space: RecordedSpace, name: str, make: Make, policy: Policy, seeds: Iterable[int]
) -> Score:
    """Many tunings."""
    results = [regret(space, make, policy, seed) for seed in seeds]
    percents = sorted(100 * each for each, _, _ in results)
    error = statistics.stdev(percents) / math.sqrt(len(percents)) if len(percents) > 1 else 0.0
    tried = sum(number for _, number, _ in results)
    spent = 1e3 * sum(seconds for _, _, seconds in results) / tried
    p95 = percents[math.ceil(0.95 * len(percents)) - 1]
    mean = statistics.fmean(percents)
    return Score(space.name, name, mean, error, p95, tried / len(results), spent)
