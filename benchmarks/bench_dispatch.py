"""Measure the cost of calling a tuned function after its tuning, and of a large config space.

    scripts/python benchmarks/bench_dispatch.py --json dispatch.json --configs 10000

Each number is the minimum of many repeats, because other processes only add time. A hit is a call
whose config is already chosen. The overhead of a hit is its time minus a plain call and one call of
``key_fn``. A dictionary lookup, the minimum for any tuner, is measured too. "contextual" is a call
under ``contextual_autotune`` of a function that launches no kernels.

With ``--configs N``, the first call with a key is measured too, for a function that does nothing:
with a record of N configs on disk, and with a tuning of N or 20 configs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import timeit
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from triton_dist.autotuner import contextual_autotune
from triton_dist.tune import autotune


def key_fn(a: int, b: int = 0) -> int:
    return a


def function(a: int, b: int = 0, *, n: int = 1) -> int:
    return a


class Layer:
    @autotune([{"n": 3}], lambda self, a, b=0: a, scope="rank")
    def tuned(self, a: int, b: int = 0, *, n: int = 1) -> int:
        return a


class DictionaryLookup:
    """The minimum for a tuner: a call that looks its config up in a dictionary."""

    def __init__(self) -> None:
        self.chosen = {1: {"n": 3}}

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        config = self.chosen.get(key_fn(*args, **kwargs))
        if config is None:
            raise LookupError(args)
        return function(*args, **kwargs, **config)


CALLS = {
    "plain call": "function(1, 2, n=3)",
    "key_fn": "key_fn(1, 2)",
    "dictionary lookup": "looked_up(1, 2)",
    "hit": "tuned(1, 2)",
    "hit of a method": "layer.tuned(1, 2)",
    "hit with keywords": "tuned(1, b=2)",
    "contextual": "contextual(1, 2)",
}


def callables() -> dict[str, Any]:
    """Return the functions that ``CALLS`` call, by name. Their configs are already chosen."""
    functions: dict[str, Any] = {
        "function": function,
        "key_fn": key_fn,
        "looked_up": DictionaryLookup(),
        "tuned": autotune([{"n": 3}], key_fn, scope="rank")(function),
        "layer": Layer(),
        "contextual": contextual_autotune()(function),
    }
    functions["tuned"](1, 2)
    functions["contextual"](1, 2)
    functions["layer"].tuned(1, 2)
    return functions


def measure(repeats: int = 200, number: int = 5000) -> dict[str, float]:
    """Return microseconds per call: the minimum of ``repeats`` averages over ``number`` calls."""
    functions = callables()
    timers = {name: timeit.Timer(statement, globals=functions) for name, statement in CALLS.items()}
    best = dict.fromkeys(CALLS, float("inf"))
    for _ in range(repeats):  # alternate, so that a slow moment of the machine affects all
        for name, timer in timers.items():
            best[name] = min(best[name], timer.timeit(number) / number * 1e6)
    return best


def overhead(times: dict[str, float], name: str) -> float:
    """Return the microseconds of ``name`` minus a plain call and a call of ``key_fn``."""
    return times[name] - times["plain call"] - times["key_fn"]


def large_space(configs: int, repeats: int = 10) -> dict[str, float]:
    """Return the milliseconds of a first call of a function that has ``configs`` configs."""
    space = [{"n": n} for n in range(configs)]
    tuned = autotune(space, key_fn, scope="rank")(function)
    few = autotune(space, key_fn, scope="rank", max_trials=20)(function)
    # The order matters: both functions have one name, and the record on disk is the later one's.
    milliseconds = {
        "tune 20": _timed(few),
        "tune all": _timed(tuned),
        "look up": float("inf"),
    }
    for _ in range(repeats):
        tuned.clear()
        milliseconds["look up"] = min(milliseconds["look up"], _timed(tuned))
    return milliseconds


def _timed(tuned: Any) -> float:
    begin = time.perf_counter()
    tuned(1, 2)
    return (time.perf_counter() - begin) * 1e3


def hardware() -> dict[str, str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description="Measure the cost of calling a tuned function.")
    parser.add_argument("--repeats", type=int, default=200, help="number of averages")
    parser.add_argument("--number", type=int, default=5000, help="calls per average")
    parser.add_argument("--configs", type=int, help="also measure a space of this size")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    times = measure(options.repeats, options.number)
    for name, microseconds in times.items():
        difference = (
            f"{overhead(times, name):8.3f}" if name.startswith(("hit", "dictionary")) else " " * 8
        )
        print(f"{name:20}{microseconds:8.3f} us{difference}")
    print("second column: minus the plain call and key_fn")
    report: dict[str, Any] = {"hardware": hardware(), "microseconds": times}
    if options.configs is not None:
        report["milliseconds"] = large_space(options.configs)
        for what, milliseconds in report["milliseconds"].items():
            print(f"{what:20}{milliseconds:8.1f} ms, {options.configs} configs")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_DIST_CACHE_DIR"] = folder
        main(sys.argv[1:])
