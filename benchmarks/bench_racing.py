"""Draft."""
from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triton_dist._tuning.values import Config, Failure, Measurement, Outcome, Policy, Request
from triton_dist.testing.replay import RecordedSpace

CELLS = 1 << 16
AMPLITUDE = 0.05
MODE = 0.03
DECIDING = 16


def _shape(name: str, rng) -> np.ndarray:
    """Factors of the time of a run, over [0, 1.25] of 5 + 10's duration."""
    at = np.arange(CELLS) / CELLS * 1.25
    span = math.exp(rng.uniform(math.log(0.03), 0.0))
    sign = rng.choice((-1.0, 1.0))
    if name == "steady":
        return np.ones(CELLS)
    if name == "ramp":
        return 1 + AMPLITUDE * sign * (2 * np.minimum(at / span, 1) - 1)
    if name == "step":
        return 1 + AMPLITUDE * sign * np.where(_switch(at, span, rng), 1.0, -1.0)
    if name == "sine":
        return 1 + AMPLITUDE * np.sin(2 * np.pi * (at / span + rng.uniform()))
    if name == "walk":
        steps = rng.normal(0, 1, CELLS) * AMPLITUDE * math.sqrt(1.25 / CELLS / span)
        walk = np.cumsum(steps) + rng.uniform(-AMPLITUDE, AMPLITUDE)
        folded = np.abs((walk - AMPLITUDE) % (4 * AMPLITUDE) - 2 * AMPLITUDE) - AMPLITUDE
        return 1 + folded
    if name == "modes":
        return 1 + MODE * np.where(_switch(at, span * 0.1 , rng), 1.0, -1.0)
    raise ValueError(name)


def _switch(at, span, rng):
    times = np.cumsum(rng.exponential(span, int(10 + 3 * 1.25 / span)))
    return (np.searchsorted(times, at) + rng.integers(2)) % 2 == 1


CLOCKS = {
    "steady": (),
    "ramp": ("ramp",),
    "step": ("step",),
    "sine": ("sine",),
    "walk": ("walk",),
    "tails": ("tails",),
    "modes": ("modes",),
    "imodes": ("imodes",),
    "all": ("walk", "tails", "modes"),
}


class World:
    """One draw."""

    def __init__(self, recorded: np.ndarray, clock: str, seed: int) -> None:
        rng = np.random.default_rng([seed, sum(map(ord, clock))])
        n, runs = recorded.shape
        order = rng.permuted(np.tile(np.arange(runs), (n, 1)), axis=1)[:, :DECIDING]
        self.runs = np.take_along_axis(recorded, np.sort(order, axis=1), axis=1)
        self.total = float(self.runs[:, :15].sum())
        self.factor = np.ones(CELLS)
        for part in CLOCKS[clock]:
            if part not in ("tails", "imodes"):
                self.factor = self.factor * _shape(part, rng)
        self.extra = np.ones(CELLS)
        if "imodes" in CLOCKS[clock]:
            self.extra *= 1 + MODE * rng.choice((-1.0, 1.0), CELLS)
        if "tails" in CLOCKS[clock]:
            self.extra *= np.where(rng.random(CELLS) < 0.05, rng.uniform(1.2, 3, CELLS), 1.0)
        self.elist = self.extra.tolist()
        self.list = self.runs.tolist()
        self.flist = self.factor.tolist()
        self.scale = CELLS / 1.25 / self.total

    def sequential(self):
        """Samples of 5+10."""
        runs = self.runs[:, :15]
        begin = (np.cumsum(runs) - runs.ravel()) * self.scale
        cell = np.minimum(begin.astype(int), CELLS - 1).reshape(runs.shape)
        return runs * self.factor[cell] * np.resize(self.extra, runs.size).reshape(runs.shape)

    def start(self):
        self.now = 0.0
        self.calls = 0
        self.taken = [0] * len(self.list)

    def run(self, i) -> float:
        own, k = self.list[i], self.taken[i]
        self.taken[i] = k + 1
        ms = own[k % DECIDING]
        f = self.flist[min(int(self.now * self.scale), CELLS - 1)] * self.elist[self.calls % CELLS]
        self.calls += 1
        self.now += ms
        return ms * f


def load(path: Path, part: int | None = None, seed: int = 0):
    space = RecordedSpace.read(path)
    configs = [c for c in space.configs if not isinstance(space.runs[c.digest], Failure)]
    if part:
        configs = [configs[i] for i in sorted(np.random.default_rng(seed).permutation(len(configs))[:part])]
    return space.name + (f"[{part}]" if part else ""), configs, np.array([space.runs[c.digest] for c in configs])


def truth(recorded):
    med = np.median(recorded, axis=1)
    best = int(med.argmin())
    s = np.sort(recorded[best])
    n = len(s)
    lo = next(k for k in range(n) if sum(math.comb(n, j) for j in range(k + 1)) / 2**n > 0.025)
    half = (s[n - 1 - lo] - s[lo]) / 2 / med[best]
    return med / med[best] - 1, max(0.01, half)


def play(world, configs, search_type, policy, decide):
    index = {c.digest: i for i, c in enumerate(configs)}
    search = search_type(configs, policy)
    world.start()
    samples: dict[int, list[float]] = {}
    requests = 0
    while (r := search.ask()) is not None:
        requests += 1
        i = index[r.config.digest]
        if i not in samples:
            samples[i] = []
            world.run(i)
        new = [world.run(i) for _ in range(r.samples)]
        samples[i] += new
        search.tell(r, Measurement(tuple(new), 0))
    ids = sorted(samples)
    outcomes = [Measurement(tuple(samples[i]), 0) for i in ids]
    return ids[decide(outcomes, policy.indifference)], world.now / world.total, requests


def oracle(world, regret):
    top = np.argsort(regret)[:10]
    world.start()
    laps = np.array([[world.run(i) for i in top] for _ in range(DECIDING)])
    return int(top[np.median(laps, 0).argmin()])
