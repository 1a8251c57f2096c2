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
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from triton_dist._tuning import protocols
from triton_dist._tuning.search import search_for, surrogate
from triton_dist._tuning.search.choose import GENERATION
from triton_dist._tuning.search.exploring import Exploring
from triton_dist._tuning.search.surrogate import Surrogate
from triton_dist._tuning.values import Config, Policy
from triton_dist.testing.replay import RecordedSpace
from triton_dist.testing.replayed import Make, Score, medians, score

HERE = Path(__file__).parent
CONSTANTS = [(alike, prior) for alike in (0.1, 0.25, 0.5) for prior in (0.5, 1.0)]
"""Weights of parameters of which nothing is known, and how far they may be learnt from there."""


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


def searches(generation: int) -> dict[str, Make]:
    found = {
        "random": _own(Anyhow),
        "surrogate": _modelled(1),
        "generations": _modelled(generation),
    }
    if importlib.util.find_spec("optuna"):
        sys.path.insert(0, str(HERE.parent / "examples"))
        from own_search import OptunaSearch

        found["optuna"] = _own(OptunaSearch)
    return found


def _policy(tries: int) -> Policy:
    return Policy.on("cuda", timing="events", search="surrogate", max_trials=tries)


def leave_one_out(spaces: Sequence[RecordedSpace], seeds: range, tries: int) -> None:
    """For each space, what the constants reach that are best on the others."""
    means: dict[tuple[float, float], dict[str, float]] = {}
    for constants in CONSTANTS:
        surrogate.ALIKE, surrogate.PRIOR = constants
        own = {s.name: score(s, "", _modelled(1), _policy(tries), seeds).mean for s in spaces}
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
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--generation", type=int, default=GENERATION, help="of `generations`")
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--search", action="append", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--leave-one-out", action="store_true")
    options = parser.parse_args(arguments)
    spaces = [RecordedSpace.read(path) for path in sorted(options.folder.glob("*_T4.json*"))]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    if options.leave_one_out:
        leave_one_out(spaces, seeds, options.tries)
        return []
    scores = []
    for space in spaces:
        valid = [each for each in medians(space).values() if each < math.inf]
        near = sum(each <= 1.05 * min(valid) for each in valid)
        print(f"{space.name}: {len(space.configs)} configs, {near} within 5 % of the best")
        for name, make in searches(options.generation).items():
            if options.search is None or name in options.search:
                found = score(space, name, make, _policy(options.tries), seeds)
                scores.append(found)
                print(f"  {found}", flush=True)
    if options.json:
        about = {"seeds": options.seeds, "tries": options.tries, "unit": "percent"}
        tree = {**about, "scores": [asdict(each) for each in scores]}
        options.json.write_text(json.dumps(tree, indent=1) + "\n")
    return scores


if __name__ == "__main__":
    main()
