"""Replay a tuning search on recorded measurements, without the hardware.

A recorded space has the times of several runs of every config. A replayed search gets these times
instead of measuring. Its result is scored by regret: the slowdown of the chosen config against the
best config of the space.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton_dist._tuning import protocols
from triton_dist._tuning.values import (
    Config,
    Failure,
    FailureKind,
    Measurement,
    Outcome,
    Policy,
    Request,
    winner,
)
from triton_dist._tuning.values.outcome import merge_outcomes
from triton_dist.errors import CandidateFailed

_FAILURE_KINDS: dict[str, FailureKind] = {
    "compile": "compile",
    "runtime": "launch",
    "timeout": "timeout",
    "constraints": "pruned",
}


@dataclass(frozen=True)
class RecordedSpace:
    """All configs of a space, with run times in milliseconds or a failure."""

    name: str
    configs: tuple[Config, ...]
    runs: Mapping[str, tuple[float, ...] | Failure]
    """Run times, in order of recording, or the failure, by digest of the config."""

    @classmethod
    def read(cls, path: Path) -> RecordedSpace:
        """Read a space in the T4 format of the autotuning community (JSON, usually gzipped).

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not in T4 format; the message names the missing field.
        """
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return cls.parse(text, path.name.partition(".")[0].removesuffix("_T4"))

    @classmethod
    def parse(cls, text: str | bytes, name: str) -> RecordedSpace:
        """Parse a space from T4 text. Raise ``ValueError`` like :meth:`read`."""
        configs: list[Config] = []
        runs: dict[str, tuple[float, ...] | Failure] = {}
        try:
            for result in json.loads(text)["results"]:
                config = Config(result["configuration"])
                configs.append(config)
                runs[config.digest] = _runs(result)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name} is not in T4 format: {error!r}") from error
        return cls(name, tuple(configs), runs)


def _runs(result: Mapping[str, Any]) -> tuple[float, ...] | Failure:
    invalidity = result["invalidity"]
    if invalidity == "correct":
        return tuple(map(float, result["times"]["runtimes"]))
    return Failure(_FAILURE_KINDS.get(invalidity, "wrong_result"), f"recorded as {invalidity!r}")


class Replay:
    """Substitute for a tuned function: a run adds a recorded time to ``milliseconds``.

    The recorded times of a config are used in order, cyclically.

    Attributes:
        milliseconds: sum of the times of all runs so far, including warm-up runs.
    """

    def __init__(self, runs: Mapping[str, Sequence[float] | Failure]) -> None:
        self._runs = runs
        self._run_counts: dict[str, int] = {}
        self.milliseconds = 0.0

    def __call__(self, /, **config: Any) -> None:
        """Replay one run of the config with these values."""
        self.run(Config(config))

    def run(self, config: Config) -> None:
        """Replay one run.

        Raises:
            CandidateFailed: the config was recorded as a failure.
        """
        runs = self._runs[config.digest]
        if isinstance(runs, Failure):
            raise CandidateFailed(f"{config}: {runs}")
        index = self._run_counts.get(config.digest, 0)
        self._run_counts[config.digest] = index + 1
        self.milliseconds += runs[index % len(runs)]

    def attempt(self, request: Request, policy: Policy) -> Outcome:
        """Return the outcome of ``request`` from recorded runs. As in a tuning, the first request
        of a config also makes one run that is not measured."""
        runs = self._runs[request.config.digest]
        if isinstance(runs, Failure):
            return runs
        if request.config.digest not in self._run_counts:
            self.run(request.config)
        times = []
        for _ in range(policy.warmup + request.num_samples):
            begin = self.milliseconds
            self.run(request.config)
            times.append(self.milliseconds - begin)
        return Measurement(tuple(times[policy.warmup :]), policy.warmup)


MakeSearch = Callable[[Sequence[Config], Policy, int], protocols.Search]
"""Create a search from candidates, a policy and a seed."""


@dataclass(frozen=True)
class Score:
    """Regret, in percent, of one search on one space, over several seeds. Regret is the slowdown of
    the chosen config against the best config of the space."""

    space: str
    search: str
    mean: float
    error: float
    """Standard error of the mean."""
    p95: float
    tried: float
    """Mean number of configs tried in a tuning."""
    milliseconds: float
    """CPU time of the search algorithm per tried config, in milliseconds."""

    def __str__(self) -> str:
        return (
            f"{self.search:12s} regret {self.mean:6.2f} % ± {self.error:.2f}, p95 {self.p95:6.2f} "
            f"%, {self.tried:5.0f} tried, {self.milliseconds:6.2f} ms a try"
        )


def medians(space: RecordedSpace) -> dict[str, float]:
    """Return the median run time in ms by digest; ``inf`` for failures."""
    return {
        digest: math.inf if isinstance(runs, Failure) else statistics.median(runs)
        for digest, runs in space.runs.items()
    }


def regret(
    space: RecordedSpace, make_search: MakeSearch, policy: Policy, seed: int
) -> tuple[float, int, float]:
    """Replay one tuning, with the recorded runs shuffled by ``seed``.

    Returns:
        Relative slowdown of the winner against the best config, by the medians of all recorded
        runs; number of configs tried; CPU seconds of the search algorithm.
    """
    generator = random.Random(seed)
    runs = {
        digest: times if isinstance(times, Failure) else tuple(generator.sample(times, len(times)))
        for digest, times in space.runs.items()
    }
    replay, outcomes, search_seconds = Replay(runs), dict[str, Outcome](), 0.0
    # The order of a recorded space is arbitrary: any config may be the default.
    candidates = generator.sample(space.configs, len(space.configs))
    started_at = time.process_time()
    search = make_search(candidates, policy, seed)
    while (request := search.ask()) is not None:
        search_seconds += time.process_time() - started_at
        outcome = replay.attempt(request, policy)
        digest = request.config.digest
        outcomes[digest] = merge_outcomes(outcomes.get(digest), outcome)
        started_at = time.process_time()
        search.tell(request, outcome)
    median_times = medians(space)
    chosen = winner(list(outcomes.values()), policy.indifference)
    chosen_ms = math.inf if chosen is None else median_times[list(outcomes)[chosen]]
    return chosen_ms / min(median_times.values()) - 1, len(outcomes), search_seconds


def score(
    space: RecordedSpace, name: str, make_search: MakeSearch, policy: Policy, seeds: Iterable[int]
) -> Score:
    """Replay one tuning per seed; return a summary of the results."""
    results = [regret(space, make_search, policy, seed) for seed in seeds]
    percents = sorted(100 * each for each, _, _ in results)
    error = statistics.stdev(percents) / math.sqrt(len(percents)) if len(percents) > 1 else 0.0
    tried = sum(number for _, number, _ in results)
    search_seconds = 1e3 * sum(seconds for _, _, seconds in results) / tried
    p95 = percents[math.ceil(0.95 * len(percents)) - 1]
    mean = statistics.fmean(percents)
    return Score(space.name, name, mean, error, p95, tried / len(results), search_seconds)
