"""How sure a race is of its winner when clocks drift, replayed on recorded spaces; needs no GPU.

    scripts/python benchmarks/bench_racing.py [folder] [--draws 30] [--json results.json]

For each draw, 16 of the recorded runs of each config are taken, in the order in which they were
recorded; after the last the first comes again. What a run takes is the recorded time, times

- *drift*: a factor within ±5 %, a function of the device time that has passed. ``ramp``, ``step``
  (between the two ends, at random moments), ``sine``, ``walk`` (a random walk that is reflected at
  the ends), all with a random span of 0.03 to 1 of the duration of 5 + 10;
- *tails*: 5 % of the runs take 1.2 to 3 times as long;
- *two modes*, ±3 %: ``modes``, a clock that is in either state for a while (spans as above, but a
  tenth as long), or ``coin``, a state that is drawn for each run.

``all`` is walk, tails and modes. Compared are

- ``racing``;
- ``5 + 10``: every config in turn, 5 times untimed and 10 times timed, the lowest mean wins;
- ``oracle``: it knows which ten configs are best, runs those in turn until it has 16 samples of
  each, and takes the lowest median. (No race can know that, but what it cannot tell nobody can.)

True is the median of all recorded runs, without what was added. *Near* is the part of the draws in
which the winner is within max(1 %, half of the 95 % interval of the best config's median) of the
best; *regret*, by how much it is slower (p95: its 95th percentile); *cost*, the time of all runs,
the untimed ones too, relative to 5 + 10's.

The folder has files in the T4 format, as for ``bench_tuning.py``. ``--noisy`` adds to each space
one more: its medians with the noise of another, to be as restless as that one's device.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from triton_dist import knobs
from triton_dist._tuning.search import Racing
from triton_dist._tuning.values import Config, Failure, Measurement, Policy, winner
from triton_dist.testing.replay import RecordedSpace

EXCERPTS = Path(__file__).parent / "data"
DRIFT, MODES = 0.05, 0.03
TAIL = 0.05
"""Part of the runs that are late."""
RUNS = 16
"""Of each config, in a draw."""
Numbers = Any
"""A numpy array of floats."""

_CELLS = 1 << 16  # moments for which the factor is known
_HORIZON = 1.25  # times the duration of 5 + 10


@dataclass(frozen=True)
class Space:
    """A recorded space without the configs that fail."""

    name: str
    configs: tuple[Config, ...]
    recorded: Numbers
    """[configs, runs], milliseconds."""

    @classmethod
    def read(cls, path: Path, most: int | None, part: int) -> Space:
        """At most so many configs, drawn at random and in their order."""
        space = RecordedSpace.read(path)
        valid = [c for c in space.configs if not isinstance(space.runs[c.digest], Failure)]
        drawn = np.sort(np.random.default_rng(part).permutation(len(valid))[:most])
        configs = tuple(valid[index] for index in drawn)
        return cls(space.name, configs, np.array([space.runs[c.digest] for c in configs]))

    def with_noise_of(self, other: Space) -> Space:
        """The medians of this space, and around them the runs of configs of ``other``."""
        drawn = np.random.default_rng(0).integers(len(other.configs), size=len(self.configs))
        noise = other.recorded / np.median(other.recorded, axis=1, keepdims=True)
        medians = np.median(self.recorded, axis=1, keepdims=True)
        return Space(f"{self.name}~{other.name}", self.configs, medians * noise[drawn])

    def regrets(self) -> Numbers:
        """By how much each config is slower than the best, relatively."""
        medians = np.median(self.recorded, axis=1)
        return medians / medians.min() - 1

    def near(self) -> float:
        """Regret up to which a winner is as good as the best."""
        best = np.sort(self.recorded[np.median(self.recorded, axis=1).argmin()])
        runs = len(best)
        below = np.cumsum([math.comb(runs, k) / 2**runs for k in range(runs)])
        out = int((below <= 0.025).sum()) - 1  # runs outside of the interval, on each side
        return max(0.01, float(best[runs - 1 - out] - best[out]) / 2 / float(np.median(best)))


def _span(draw: np.random.Generator) -> float:
    return math.exp(draw.uniform(math.log(0.03), 0.0))


def _ramp(draw: np.random.Generator, at: Numbers) -> Numbers:
    return DRIFT * draw.choice((-1.0, 1.0)) * (2 * np.minimum(at / _span(draw), 1.0) - 1)


def _sine(draw: np.random.Generator, at: Numbers) -> Numbers:
    return DRIFT * np.sin(2 * np.pi * (at / _span(draw) + draw.uniform()))


def _walk(draw: np.random.Generator, at: Numbers) -> Numbers:
    steps = DRIFT * math.sqrt(_HORIZON / _CELLS / _span(draw)) * draw.normal(size=len(at))
    walk = np.cumsum(steps) + draw.uniform(-DRIFT, DRIFT)
    return np.abs((walk - DRIFT) % (4 * DRIFT) - 2 * DRIFT) - DRIFT


def _two_states(draw: np.random.Generator, at: Numbers, span: float) -> Numbers:
    """-1 or 1, for an exponentially distributed while of ``span`` in the mean."""
    changes = np.cumsum(draw.exponential(span, int(10 + 3 * _HORIZON / span)))
    return 2.0 * ((np.searchsorted(changes, at) + draw.integers(2)) % 2) - 1


def _step(draw: np.random.Generator, at: Numbers) -> Numbers:
    return DRIFT * _two_states(draw, at, _span(draw))


def _modes(draw: np.random.Generator, at: Numbers) -> Numbers:
    return MODES * _two_states(draw, at, _span(draw) / 10)


def _coin(draw: np.random.Generator, at: Numbers) -> Numbers:
    return MODES * draw.choice((-1.0, 1.0), len(at))


def _tails(draw: np.random.Generator, at: Numbers) -> Numbers:
    return np.where(draw.random(len(at)) < TAIL, draw.uniform(0.2, 2.0, len(at)), 0.0)


Part = Callable[[np.random.Generator, Numbers], Numbers]
OF_THE_TIME: dict[str, Part] = {
    "ramp": _ramp,
    "step": _step,
    "sine": _sine,
    "walk": _walk,
    "modes": _modes,
}
OF_THE_RUN: dict[str, Part] = {"tails": _tails, "coin": _coin}
WORLDS = {
    "steady": (),
    **{name: (name,) for name in (*OF_THE_TIME, *OF_THE_RUN)},
    "all": ("walk", "tails", "modes"),
}


class Draw:
    """A device on which each config of a space takes as long as some of its recorded runs did,
    changed by what a world adds.

    Attributes:
        cost: time of all runs since :meth:`begin`, relative to 5 + 10's.
    """

    def __init__(self, space: Space, world: str, seed: int) -> None:
        draw = np.random.default_rng([seed, *world.encode()])
        configs, recorded = space.recorded.shape
        order = draw.permuted(np.tile(np.arange(recorded), (configs, 1)), axis=1)[:, :RUNS]
        self._runs = np.take_along_axis(space.recorded, np.sort(order, axis=1), axis=1)
        self._duration = float(self._runs[:, :15].sum())
        at = np.arange(_CELLS) * (_HORIZON / _CELLS)
        of_the_time, of_the_run = np.ones(_CELLS), np.ones(_CELLS)
        for part in WORLDS[world]:
            if part in OF_THE_TIME:
                of_the_time *= 1 + OF_THE_TIME[part](draw, at)
            else:
                of_the_run *= 1 + OF_THE_RUN[part](draw, at)
        self._of_the_time, self._of_the_run = of_the_time, of_the_run
        # As lists: a race takes one run after another.
        self._lists = [each.tolist() for each in (self._runs, of_the_time, of_the_run)]
        self.begin()

    def begin(self) -> None:
        """As if nothing had been run."""
        self._taken = [0] * len(self._runs)
        self._number, self._now = 0, 0.0

    @property
    def cost(self) -> float:
        return self._now / self._duration

    def run(self, config: int) -> float:
        """Milliseconds of one run."""
        runs, of_the_time, of_the_run = self._lists
        recorded: float = runs[config][self._taken[config] % RUNS]
        cell = min(int(self.cost / _HORIZON * _CELLS), _CELLS - 1)
        took: float = recorded * of_the_time[cell] * of_the_run[self._number % _CELLS]
        self._taken[config] += 1
        self._number += 1
        self._now += recorded
        return took

    def one_after_another(self) -> Numbers:
        """The first 15 runs of each config, [configs, 15]: what :meth:`run` gives, at once."""
        runs = self._runs[:, :15]
        begin = (np.cumsum(runs) - runs.ravel()) / self._duration / _HORIZON * _CELLS
        cells = np.minimum(begin.astype(int), _CELLS - 1)
        numbers = np.arange(runs.size) % _CELLS
        factors = self._of_the_time[cells] * self._of_the_run[numbers]
        return runs * factors.reshape(runs.shape)


def racing(space: Space, draw: Draw) -> tuple[int, float]:
    """The winner's index, and the cost."""
    policy = Policy.on("cuda", timing="events", search="racing")
    search = Racing(space.configs, policy)
    places = {config.digest: place for place, config in enumerate(space.configs)}
    samples: defaultdict[int, tuple[float, ...]] = defaultdict(tuple)
    draw.begin()
    while (request := search.ask()) is not None:
        place = places[request.config.digest]
        if place not in samples:
            draw.run(place)  # the run to the end
        taken = tuple(draw.run(place) for _ in range(policy.warmup + request.samples))
        outcome = Measurement(taken[policy.warmup :], policy.warmup)
        samples[place] += outcome.samples
        search.tell(request, outcome)
    tried = sorted(samples)
    outcomes = [Measurement(samples[each], policy.warmup) for each in tried]
    first = winner(outcomes, policy.indifference)
    assert first is not None
    return tried[first], draw.cost


def five_and_ten(space: Space, draw: Draw) -> tuple[int, float]:
    """The same."""
    return int(draw.one_after_another()[:, 5:].mean(axis=1).argmin()), 1.0


def oracle(space: Space, draw: Draw) -> tuple[int, float]:
    """The same."""
    best = np.argsort(space.regrets(), kind="stable")[:10]
    draw.begin()
    laps = [[draw.run(config) for config in best] for _ in range(RUNS)]
    return int(best[np.median(laps, axis=0).argmin()]), draw.cost


DECISIONS = {"racing": racing, "5 + 10": five_and_ten, "oracle": oracle}


@dataclass(frozen=True)
class Score:
    """What one way to decide did on one space, in one world."""

    space: str
    configs: int
    world: str
    decision: str
    draws: int
    within: float
    """Regret that is near."""
    near: float
    regret_mean: float
    regret_p95: float
    cost: float


def score(space: Space, world: str, seeds: Sequence[int]) -> list[Score]:
    """Every way to decide, on the same draws."""
    regrets, within = space.regrets(), space.near()
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for seed in seeds:
        draw = Draw(space, world, seed)
        for name, decide in DECISIONS.items():
            first, cost = decide(space, draw)
            found[name].append((float(regrets[first]), cost))
    scores = []
    for name, each in found.items():
        regret, cost = np.array(each).T
        scores.append(
            Score(
                space=space.name,
                configs=len(space.configs),
                world=world,
                decision=name,
                draws=len(seeds),
                within=within,
                near=float((regret <= within + 1e-9).mean()),
                regret_mean=float(regret.mean()),
                regret_p95=float(np.quantile(regret, 0.95)),
                cost=float(cost.mean()),
            )
        )
    return scores


def main(arguments: Sequence[str] | None = None) -> list[Score]:
    """Print a table, and write what is in it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=EXCERPTS, help="of *_T4.json.gz")
    parser.add_argument("--draws", type=int, default=30, help="of each space and world")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--configs", type=int, help="take so many configs of each space")
    parser.add_argument("--part", type=int, default=0, help="seed of that choice")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS))
    parser.add_argument("--noisy", type=Path, help="a space that lends its noise to each")
    parser.add_argument("--json", type=Path, help="file for the results")
    asked = parser.parse_args(arguments)
    files = sorted(asked.folder.glob("*_T4.json.gz"))
    if not files:
        parser.error(f"no *_T4.json.gz in {asked.folder}")
    spaces = [Space.read(file, asked.configs, asked.part) for file in files]
    if asked.noisy is not None:
        noisy = Space.read(asked.noisy, None, 0)
        spaces += [space.with_noise_of(noisy) for space in spaces]

    print(f"{'space':22}{'configs':>8}{'world':>8}", end="")
    print("".join(f" |{name:>7}{'near':>6}{'p95':>8}{'cost':>7}" for name in DECISIONS))
    scores = []
    for space in spaces:
        for world in asked.worlds:
            each = score(space, world, range(asked.first_seed, asked.first_seed + asked.draws))
            print(f"{space.name:22.22}{len(space.configs):8}{world:>8}", end="")
            columns = [f"{s.near:13.0%}{s.regret_p95:8.2%}{s.cost:7.3f}" for s in each]
            print("".join(f" |{column}" for column in columns), flush=True)
            scores += each
    mean = statistics.fmean(each.cost for each in scores if each.decision == "racing")
    print(f"mean cost of racing {mean:.3f}; {asked.draws} draws")
    if asked.json is not None:
        result = {
            "benchmark": "racing",
            "hardware": "that of the recordings, by name; replayed on " + platform.machine(),
            "python": platform.python_version(),
            "draws": [asked.first_seed, asked.first_seed + asked.draws],
            "policy": dict(vars(Policy.on("cuda", timing="events", search="racing"))),
            "scores": [asdict(each) for each in scores],
        }
        asked.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return scores


if __name__ == "__main__" and knobs.rank.get() == 0:  # launched on several ranks, one does it all
    main(sys.argv[1:])
