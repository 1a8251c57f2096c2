"""How near the best searches come that try few of many configs; needs no GPU.

    scripts/python benchmarks/bench_search.py [folder] [--seeds 24] [--tries 200] [--json F.json]
    scripts/python benchmarks/bench_search.py [folder] --leave-one-out

Searches of ``tune.autotune`` are replayed on recorded spaces, in files in the T4 format, as for
``bench_tuning.py``: each request takes recorded runs of its config, in an order that differs by
seed, and the winner is the one that a tuning would choose, after its final. *Regret* is by how much
the median of all recorded runs of that config is above that of the best. Compared are

- ``random``: configs at random;
- ``surrogate``: ``search="surrogate"`` where nothing is compiled ahead;
- ``generations``: the same with candidates chosen some at a time, as where they are compiled ahead;
- ``optuna``: its TPE, by ``examples/own_search.py``; left out where optuna is not installed.

``--leave-one-out`` judges the constants of the model: for each space it takes those that are best
on the other spaces, and says what they reach on that one.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from triton_dist._tuning import protocols
from triton_dist._tuning.search import model, search_for
from triton_dist._tuning.search.exploring import Exploring
from triton_dist._tuning.search.surrogate import Surrogate
from triton_dist._tuning.values import Config, Failure, Outcome, Policy, winner
from triton_dist._tuning.values.outcome import joined
from triton_dist.testing.replay import RecordedSpace, Replay

HERE = Path(__file__).parent
Make = Callable[[Sequence[Config], Policy, int], protocols.Search]
"""A search of candidates, for a policy and a seed."""
CONSTANTS = [(alike, prior) for alike in (0.1, 0.25, 0.5) for prior in (0.5, 1.0)]
"""Weights of parameters of which nothing is known, and how far they may be learnt from there."""


@dataclass(frozen=True)
class Score:
    """One search on one space; regrets in percent."""

    space: str
    search: str
    mean: float
    error: float
    """Standard error of the mean."""
    p95: float
    milliseconds: float
    """Processor time of the search, for each config that is tried."""


class Anyhow:
    """Configs at random, as :class:`triton_dist.tune.Search`."""

    def __init__(self, values: Mapping[str, Sequence[Any]], seed: int) -> None:
        self._values, self._draw = values, random.Random(seed)

    def ask(self) -> dict[str, Any]:
        return {name: self._draw.choice(own) for name, own in self._values.items()}

    def tell(self, config: Mapping[str, Any], milliseconds: float | None) -> None:
        """Nothing to learn."""


def _own(kind: Callable[..., Any]) -> Make:
    def make(candidates: Sequence[Config], policy: Policy, seed: int) -> protocols.Search:
        return search_for(candidates, policy, own=functools.partial(kind, seed=seed))

    return make


def _modelled(generation: int) -> Make:
    def make(candidates: Sequence[Config], policy: Policy, seed: int) -> protocols.Search:
        return Exploring(Surrogate(candidates, generation, seed), candidates, policy)

    return make


def searches() -> dict[str, Make]:
    from triton_dist._tuning.search.choose import GENERATION

    found = {
        "random": _own(Anyhow),
        "surrogate": _modelled(1),
        "generations": _modelled(GENERATION),
    }
    if importlib.util.find_spec("optuna"):
        sys.path.insert(0, str(HERE.parent / "examples"))
        from own_search import OptunaSearch

        found["optuna"] = _own(OptunaSearch)
    return found


def medians(space: RecordedSpace) -> dict[str, float]:
    """By digest; ``inf`` for what fails."""
    return {
        digest: math.inf if isinstance(runs, Failure) else statistics.median(runs)
        for digest, runs in space.runs.items()
    }


def regret(space: RecordedSpace, make: Make, seed: int, tries: int) -> tuple[float, float]:
    """Regret of one tuning, relative, and the processor seconds that its search took."""
    policy = Policy.on("cuda", timing="events", search="surrogate", max_trials=tries)
    draw, taken = random.Random(seed), time.process_time()
    runs = {
        digest: own if isinstance(own, Failure) else tuple(draw.sample(own, len(own)))
        for digest, own in space.runs.items()
    }
    replay, outcomes = Replay(runs), dict[str, Outcome]()
    # The default of a recorded space means nothing: any config may be first.
    candidates = draw.sample(space.configs, len(space.configs))
    taken, spent = time.process_time(), 0.0
    search = make(candidates, policy, seed)
    while (request := search.ask()) is not None:
        spent += time.process_time() - taken
        outcome = replay.attempt(request, policy)
        digest = request.config.digest
        outcomes[digest] = joined(outcomes.get(digest), outcome)
        taken = time.process_time()
        search.tell(request, outcome)
    chosen = winner(list(outcomes.values()), policy.indifference)
    assert chosen is not None, f"nothing of {space.name} that was tried is valid"
    true = medians(space)
    return true[list(outcomes)[chosen]] / min(true.values()) - 1, spent


def score(space: RecordedSpace, name: str, make: Make, seeds: Iterable[int], tries: int) -> Score:
    results = [regret(space, make, seed, tries) for seed in seeds]
    percents = sorted(100 * each for each, _ in results)
    error = statistics.stdev(percents) / math.sqrt(len(percents)) if len(percents) > 1 else 0.0
    spent = 1e3 * statistics.fmean(spent for _, spent in results) / tries
    p95 = percents[math.ceil(0.95 * len(percents)) - 1]
    return Score(space.name, name, statistics.fmean(percents), error, p95, spent)


def leave_one_out(spaces: Sequence[RecordedSpace], seeds: range, tries: int) -> None:
    """For each space, what the constants reach that are best on the others."""
    means: dict[tuple[float, float], dict[str, float]] = {}
    for constants in CONSTANTS:
        model.ALIKE, model.PRIOR = constants
        own = {s.name: score(s, "", _modelled(1), seeds, tries).mean for s in spaces}
        means[constants] = own
        print(f"alike {constants[0]:g}, prior {constants[1]:g}: {_shown(own)}", flush=True)
    for space in spaces:
        others = [each.name for each in spaces if each is not space]
        best = min(means, key=lambda each: sum(means[each][name] for name in others))
        print(
            f"{space.name}: {means[best][space.name]:.2f} % with alike {best[0]:g}, prior "
            f"{best[1]:g}, which are best on {', '.join(others)}"
        )


def _shown(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {mean:.2f} %" for name, mean in means.items())


def main(arguments: Sequence[str] | None = None) -> list[Score]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HERE / "data")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--search", action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    options = parser.parse_args(arguments)
    spaces = [RecordedSpace.read(path) for path in sorted(options.folder.glob("*_T4.json*"))]
    seeds = range(options.seeds)
    if options.leave_one_out:
        leave_one_out(spaces, seeds, options.tries)
        return []
    scores = []
    for space in spaces:
        valid = [each for each in medians(space).values() if each < math.inf]
        near = sum(each <= 1.05 * min(valid) for each in valid)
        print(f"{space.name}: {len(space.configs)} configs, {near} within 5 % of the best")
        for name, make in searches().items():
            if options.search is None or name in options.search:
                found = score(space, name, make, seeds, options.tries)
                scores.append(found)
                print(
                    f"  {name:12s} regret after {options.tries} tries {found.mean:6.2f} % ± "
                    f"{found.error:.2f}, p95 {found.p95:6.2f} %, {found.milliseconds:6.2f} ms "
                    "a try",
                    flush=True,
                )
    if options.json:
        about = {"seeds": options.seeds, "tries": options.tries, "unit": "percent"}
        tree = {**about, "scores": [asdict(each) for each in scores]}
        options.json.write_text(json.dumps(tree, indent=1) + "\n")
    return scores


if __name__ == "__main__":
    main()
