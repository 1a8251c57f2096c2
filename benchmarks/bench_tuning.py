"""What searches cost and find, replayed on recorded spaces; needs no GPU.

    scripts/python benchmarks/bench_tuning.py [folder] [--seeds 200] [--json results.json]

In a recorded space every config was run 32 times. For each seed, 16 runs of each config are drawn
(they stay in the order in which they were recorded) for a search to decide on; its winner is judged
by the median of the other 16, which it never saw. Compared with running everything 5 times untimed
and 10 times timed, lowest mean wins, which is what most tuners do:

- cost: time of all runs on the device, the untimed ones too, relative to those 15 of each config;
- regret: by how much the winner is slower than the best config, both judged;
- within 1 %: seeds whose winner is the best config, or truly within 1 % of it: by all 32 runs,
  because of several equals any may be the best of 16;
- same: seeds whose winner is the most frequent one.

The folder has files in the T4 format of the autotuning community. By default it is that of the
excerpts beside this file. The whole spaces are convolution_milo and dedispersion_milo of
github.com/AutoTuningAssociation/benchmark_hub.
"""

from __future__ import annotations

import argparse
import collections
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triton_dist import knobs
from triton_dist._tuning.search import Exhaustive, Racing
from triton_dist._tuning.values import Failure, Measurement, Outcome, Policy, winner
from triton_dist.testing.replay import RecordedSpace, Replay

EXCERPTS = Path(__file__).parent / "data"
DECIDING = 16
"""Runs of each config that a search may see; the others judge."""
Search = Callable[[RecordedSpace, Replay], int]
"""Decides on a config of the space, by its index."""


@dataclass(frozen=True)
class Score:
    """What one search did on one space."""

    space: str
    configs: int
    search: str
    seeds: int
    cost: float
    regret_mean: float
    regret_p95: float
    within_1_percent: float
    same: float
    seconds: float
    """Of replaying, one seed: the search's own time among it."""


def five_and_ten(space: RecordedSpace, replay: Replay) -> int:
    """Everything measured, lowest mean wins."""
    policy = Policy(warmup=4, repeat=10)  # the fifth is the first run
    outcomes = _tune(space, replay, policy)
    means = [
        sum(each.samples) / 10 if isinstance(each, Measurement) else float("inf")
        for each in outcomes
    ]
    return means.index(min(means))


def _searched(search: str) -> Search:
    policy = Policy.on("cuda", timing="events", search=search)

    def decide(space: RecordedSpace, replay: Replay) -> int:
        index = winner(_tune(space, replay, policy), policy.indifference)
        assert index is not None, f"{space.name}: every config failed"
        return index

    return decide


SEARCHES: dict[str, Search] = {
    "5 + 10": five_and_ten,
    "exhaustive": _searched("exhaustive"),
    "racing": _searched("racing"),
}


def _tune(space: RecordedSpace, replay: Replay, policy: Policy) -> list[Outcome]:
    """The outcomes, in the order of the space."""
    search = {"exhaustive": Exhaustive, "racing": Racing}[policy.search](space.configs, policy)
    samples: dict[str, tuple[float, ...]] = collections.defaultdict(tuple)
    failures: dict[str, Failure] = {}
    while (request := search.ask()) is not None:
        outcome = replay.attempt(request, policy)
        search.tell(request, outcome)
        if isinstance(outcome, Failure):
            failures[request.config.digest] = outcome
        else:
            samples[request.config.digest] += outcome.samples
    return [
        failures.get(digest) or Measurement(samples[digest], policy.warmup)
        for digest in (config.digest for config in space.configs)
    ]


def score(space: RecordedSpace, seeds: Sequence[int]) -> list[Score]:
    """Every search on ``space``."""
    valid = [c.digest for c in space.configs if not isinstance(space.runs[c.digest], Failure)]
    recorded = np.array([space.runs[digest] for digest in valid])  # [configs, runs], ms
    row = {digest: index for index, digest in enumerate(valid)}
    true = np.median(recorded, axis=1)
    winners: dict[str, list[int]] = {name: [] for name in SEARCHES}
    costs: dict[str, list[float]] = {name: [] for name in SEARCHES}
    regrets: dict[str, list[float]] = {name: [] for name in SEARCHES}
    seconds = dict.fromkeys(SEARCHES, 0.0)
    for seed in seeds:
        order = np.random.default_rng(seed).permuted(
            np.tile(np.arange(recorded.shape[1]), (len(valid), 1)), axis=1
        )
        deciding, judging = (
            np.take_along_axis(recorded, np.sort(half, axis=1), axis=1)
            for half in (order[:, :DECIDING], order[:, DECIDING:])
        )
        judged = np.median(judging, axis=1)
        runs: dict[str, Any] = dict(space.runs) | dict(zip(valid, deciding.tolist(), strict=True))
        for name, search in SEARCHES.items():
            replay, begin = Replay(runs), time.perf_counter()
            chosen = row[space.configs[search(space, replay)].digest]
            seconds[name] += time.perf_counter() - begin
            winners[name].append(chosen)
            costs[name].append(replay.milliseconds / float(deciding[:, :15].sum()))
            regrets[name].append(float(judged[chosen] / judged.min() - 1))
    return [
        Score(
            space=space.name,
            configs=len(space.configs),
            search=name,
            seeds=len(seeds),
            cost=float(np.mean(costs[name])),
            regret_mean=float(np.mean(regrets[name])),
            regret_p95=float(np.quantile(regrets[name], 0.95)),
            within_1_percent=float(np.mean(true[winners[name]] <= 1.01 * true.min())),
            same=collections.Counter(winners[name]).most_common(1)[0][1] / len(seeds),
            seconds=seconds[name] / len(seeds),
        )
        for name in SEARCHES
    ]


def part(space: RecordedSpace, configs: int | None, seed: int) -> RecordedSpace:
    """So many configs of ``space``, drawn at random, in a random order."""
    if configs is None:
        return space
    drawn = np.random.default_rng(seed).permutation(len(space.configs))[:configs]
    chosen = tuple(space.configs[index] for index in drawn)
    return RecordedSpace(f"{space.name}[{configs}, part {seed}]", chosen, space.runs)


def main(arguments: Sequence[str] | None = None) -> list[Score]:
    """Print a table, and write what is in it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=EXCERPTS, help="of *_T4.json.gz")
    parser.add_argument("--seeds", type=int, default=200, help="number of random splits")
    parser.add_argument("--first-seed", type=int, default=0, help="constants are tuned on 1000 up")
    parser.add_argument("--configs", type=int, help="take so many configs of each space")
    parser.add_argument("--part", type=int, default=0, help="seed of that choice")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args(arguments)
    seeds = range(asked.first_seed, asked.first_seed + asked.seeds)
    files = sorted(asked.folder.glob("*_T4.json.gz"))
    if not files:
        parser.error(f"no *_T4.json.gz in {asked.folder}")

    print(f"{'space':34}{'configs':>8} {'search':11}{'cost':>7}{'regret':>9}{'p95':>9}", end="")
    print(f"{'in 1 %':>8}{'same':>7}{'s':>7}")
    scores = []
    for file in files:
        for each in score(part(RecordedSpace.read(file), asked.configs, asked.part), seeds):
            print(
                f"{each.space:34}{each.configs:8} {each.search:11}{each.cost:7.3f}"
                f"{each.regret_mean:9.3%}{each.regret_p95:9.3%}"
                f"{each.within_1_percent:8.1%}{each.same:7.1%}{each.seconds:7.2f}",
                flush=True,
            )
            scores.append(each)
    print(
        "5 + 10: each config run 5 times untimed and 10 times timed; cost: device time over that;\n"
        "regret: by how much the winner is slower than the best, mean and 95th percentile;\n"
        "in 1 %: seeds with a winner within 1 % of the best; same: with the most frequent winner;\n"
        "s: seconds of one replay"
    )
    if asked.json is not None:
        result = {
            "benchmark": "tuning",
            "hardware": "that of the recordings, by name; replayed on " + platform.machine(),
            "python": platform.python_version(),
            "seeds": [seeds.start, seeds.stop],
            "policy": dict(Policy.on("cuda", timing="events", search="racing").facts()),
            "scores": [asdict(each) for each in scores],
        }
        asked.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return scores


if __name__ == "__main__" and knobs.rank.get() == 0:  # launched on several ranks, one does it all
    main(sys.argv[1:])
