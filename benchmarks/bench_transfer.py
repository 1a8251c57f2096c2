"""What a tuning costs, and how good it is, beside sizes that are tuned; replayed, needs no GPU.

    scripts/python benchmarks/bench_transfer.py [space.json.gz ...] [--draws 30] [--ms 30]

A space of ``record_spaces.py`` has all configs at many M. In each draw the sizes that are powers of
two are tuned by a race, and then every other size: by a race, by what its neighbours learned, and
by the same *blind*: where nothing is known of waves. Of a config's recorded runs each race takes
its own, drawn at random.

*near*: how often the winner is within 1 % of the best, or of what its noise hides, by the median of
all recorded runs; *regret*, 95th percentile and worst; *cost*: device time of all runs, relative to
the race at the same size.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from triton_dist._tuning.engine.transfer import REACH, Neighbours, nearest
from triton_dist._tuning.protocols import Search
from triton_dist._tuning.search import Brief, Racing
from triton_dist._tuning.values import (
    Config,
    Fingerprint,
    Key,
    Policy,
    Sizes,
    Trial,
    TuningRecord,
    fine_bucket,
)
from triton_dist._tuning.values.outcome import joined
from triton_dist._tuning.values.sizes import distance
from triton_dist.testing.replay import Replay

DATA = Path(__file__).parent / "data"
WAYS = ("race", "transfer", "blind")
_SIZES = Sizes("recorded", {"M": fine_bucket})
_POLICY = Policy.on("cuda", timing="events", search="racing")


class Recorded(NamedTuple):
    """Key of a recorded size."""

    M: int


@dataclass(frozen=True)
class Space:
    """A recorded op: runs of each config by M."""

    name: str
    runs: Mapping[int, Mapping[Config, Sequence[float]]]
    safe: frozenset[Config]
    waves: Mapping[int, Mapping[Config, float | None]]

    @classmethod
    def read(cls, path: Path) -> Space:
        """A file of ``record_spaces.py``."""
        tree = json.loads(gzip.decompress(path.read_bytes()))
        configs = [Config({"config": text}) for text in tree["configs"]]
        runs = {
            int(M): {configs[int(at)]: each for at, each in by.items() if isinstance(each, list)}
            for M, by in tree["sizes"].items()
        }
        safe = frozenset(configs[place] for place in tree["safe"])
        waves = {
            int(M): dict(zip(configs, each, strict=True))
            for M, each in tree.get("waves", {}).items()
        }
        return cls(f"{tree['op']} {tree['largest']}, {tree['ranks']} GPU", runs, safe, waves)

    def waves_at(self, config: Config, sizes: Sequence[int]) -> float | None:
        return self.waves.get(sizes[0], {}).get(config)

    def medians(self, M: int) -> dict[Config, float]:
        return {config: statistics.median(each) for config, each in self.runs[M].items()}


@dataclass
class Result:
    """One size, tuned in one way."""

    regret: float
    near: bool
    milliseconds: float


def race(space: Space, M: int, search: Search, draw: random.Random) -> tuple[TuningRecord, float]:
    """The record of a search at ``M``, and the milliseconds of its runs."""
    shuffled = {c.digest: draw.sample(list(r), len(r)) for c, r in space.runs[M].items()}
    replay, outcomes = Replay(shuffled), {}
    while (request := search.ask()) is not None:
        outcome = replay.attempt(request, _POLICY)
        search.tell(request, outcome)
        outcomes[request.config] = joined(outcomes.get(request.config), outcome)
    trials = tuple(Trial.of(c, outcomes[c]) for c in space.runs[M] if c in outcomes)
    return TuningRecord(_key(M), _FINGERPRINT, trials, "", 0.0), replay.milliseconds


def _key(M: int) -> Key:
    return Key.of("recorded", Recorded(M), "recorded")


_FINGERPRINT = Fingerprint({}, {}, {}, _POLICY.facts(), {}, "")


def neighbours(space: Space, M: int, known: Mapping[int, TuningRecord], blind: bool) -> Neighbours:
    """Those of ``M`` among the ``known``. ``blind``: to waves."""
    far = {size: distance((size,), (M,)) for size in known}
    near = nearest((far[size], (size,), known[size]) for size in known if far[size] <= REACH)
    family = _SIZES.family(Recorded(M))
    found = Neighbours(family, near, lambda config: config in space.safe)
    return found if blind else dataclasses.replace(found, waves=space.waves_at)


def judged(space: Space, M: int, record: TuningRecord, milliseconds: float) -> Result:
    medians = {config.digest: ms for config, ms in space.medians(M).items()}
    best = min(space.runs[M], key=lambda config: medians[config.digest])
    regret = medians[record.best.digest] / medians[best.digest] - 1
    return Result(regret, regret <= max(0.01, _half_interval(space.runs[M][best])), milliseconds)


def _half_interval(runs: Sequence[float]) -> float:
    """Half of the 95 % interval of the median, relative to it."""
    ranked, n = sorted(runs), len(runs)
    below = [math.comb(n, k) / 2**n for k in range(n)]
    out = max(sum(sum(below[: k + 1]) <= 0.025 for k in range(n)) - 1, 0)
    return (ranked[n - 1 - out] - ranked[out]) / 2 / statistics.median(runs)


def replay(space: Space, draws: int, milliseconds: float) -> dict[str, list[Result]]:
    """Results of each way at every size that is no power of two, in random order. What was carried
    over is a neighbour of those that come later."""
    results: dict[str, list[Result]] = {way: [] for way in WAYS}
    for number in range(draws):
        draw = random.Random(number)
        powers = [M for M in space.runs if M & (M - 1) == 0]
        anchors = {M: race(space, M, _racing(space, M), draw)[0] for M in powers}
        others = draw.sample(
            [M for M in space.runs if M not in anchors], len(space.runs) - len(anchors)
        )
        for way, each in results.items():
            known = dict(anchors)
            for M in others:
                search: Search = _racing(space, M)
                if way != "race":
                    near = neighbours(space, M, known, way == "blind")
                    few = near.candidates(list(space.runs[M]), milliseconds)
                    search = Brief(few, _POLICY, milliseconds)
                record, spent = race(space, M, search, draw)
                known[M] = dataclasses.replace(record, carried="carried over")
                each.append(judged(space, M, record, spent))
    return results


def _racing(space: Space, M: int) -> Racing:
    return Racing(list(space.runs[M]), _POLICY)


def report(name: str, results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """The numbers of one space; costs relative to the race at the same size."""
    rows = {}
    costs = [each.milliseconds for each in results["race"]]
    for way, each in results.items():
        regrets = sorted(result.regret for result in each)
        rows[way] = {
            "near": sum(result.near for result in each) / len(each),
            "regret p95": regrets[int(0.95 * (len(regrets) - 1))],
            "regret worst": regrets[-1],
            "cost": statistics.fmean(r.milliseconds / c for r, c in zip(each, costs, strict=True)),
            "ms": statistics.fmean(result.milliseconds for result in each),
        }
    return {"space": name, "sizes x draws": len(costs), **rows}


def show(tree: Mapping[str, Any], say: Callable[[str], Any] = print) -> None:
    say(f"{tree['space']}, {tree['sizes x draws']} tunings")
    for way in WAYS:
        row = tree[way]
        say(
            f"  {way:>8}: near {row['near']:.0%}, regret p95 {row['regret p95']:.1%}, worst "
            f"{row['regret worst']:.1%}, cost {row['cost']:.2f}, {row['ms']:.0f} ms"
        )


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spaces", nargs="*", type=Path, help="default: those in benchmarks/data")
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--ms", type=float, default=30.0, help="device time of a transfer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    trees = []
    for path in options.spaces or sorted(DATA.glob("*_sizes.json.gz")):
        space = Space.read(path)
        trees.append(report(space.name, replay(space, options.draws, options.ms)))
        show(trees[-1])
    if options.json is not None:
        options.json.write_text(json.dumps(trees, indent=1) + "\n", encoding="utf-8")
    return trees


if __name__ == "__main__":
    main()
